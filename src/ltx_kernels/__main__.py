"""The command line: `python -m ltx_kernels info` and `python -m ltx_kernels demo`."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "info":
        from ltx_kernels import _info

        return _info.main(as_json=args.json, self_test=args.self_test)
    needed = ("rich", "matplotlib") if args.save else ("rich",)
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        print(f"demo: needs the extra [demo]: pip install {' '.join(absent)}", file=sys.stderr)
        return 1
    from ltx_kernels import _demo

    return _demo.main(args.tokens, args.save)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ltx_kernels", description="Kernels for running LTX-2.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what this build holds and what of it runs here")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--self-test", action="store_true", help="run each op on each backend, against float64")
    demo = commands.add_parser("demo", help="one LTX-2 video block, quantized, against full precision")
    demo.add_argument("--tokens", type=_count, metavar="N", help="video tokens (default: what suits this machine)")
    demo.add_argument("--save", type=_figure_path, metavar="PNG", help="draw times and errors into this file")
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _figure_path(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be in an existing folder, got {text!r}")
    return path


if __name__ == "__main__":
    sys.exit(main())
