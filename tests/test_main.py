"""`python -m ltx_kernels`: both commands, what they print, and what they refuse."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltx_kernels import All2All, __main__, _compare, _demo, _info, _self_test
from ltx_kernels._backends import BACKENDS
from ltx_kernels._block import STEPS
from ltx_kernels.blockwise import functional, get_backend

FORMATS = ("FP8", "FP6")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ltx_kernels", *arguments], check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    path = tmp_path_factory.mktemp("demo") / "out.png"
    return command("demo", "--tokens", "5", "--save", str(path)), path


# Ten seconds on the CPU, minutes under a sanitizer, which sees the ops in their own tests.
@pytest.mark.build
def test_demo_prints_every_step_and_both_formats(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run, _ = demo
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    assert "5 tokens" in run.stdout and "reference in float64" in run.stdout
    number = r"[\d.]+ (?:s|ms|us) +(?P<{0}>[\d.]+)% +"
    for step in STEPS:
        pattern = re.escape(step.title) + r" +\w+ +5×\d+ +" + number.format("fp8") + number.format("fp6")
        found = re.search(pattern + r"(?P<limit>[\d.]+)%", run.stdout)
        assert found, f"{step.title} is not in\n{run.stdout}"
        fp8, fp6, limit = (float(found[name]) for name in ("fp8", "fp6", "limit"))
        assert 0 < fp8 < limit and 0 < fp6 < limit
    # 4096 x 12320, 4096 x 4096 and twice 4096 x 16384 weights and their biases, in bytes of two, one and three quarters.
    for name, memory, share in (("bf16", 403, 100), ("FP8", 202, 50), ("FP6", 151, 38)):
        assert re.search(rf"^{name} +{memory} MB +{share}%", run.stdout, re.MULTILINE), run.stdout
    assert max(len(line) for line in run.stdout.splitlines() if "drawn in" not in line) <= 80


@pytest.mark.build
def test_demo_draws_a_figure(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run, path = demo
    assert f"drawn in {path}" in run.stdout
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def result(**changes: float) -> _compare.Result:
    row = _compare.Row("FFN up product", "cpu", "4×8", 1.5e-3, changes.pop("error", 0.001), 0.002)
    copy = _compare.Row("  to cuda", "copy", "1.0 MB", 2e-6)
    whole = _compare.Result([copy, row], 10, 20, weight_error=0.02, weight_limit=0.04, block_error=0.1, block_limit=0.2)
    return dataclasses.replace(whole, **changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"error": 0.0021}, "demo: error of FFN up product, FP6, must be at most 0.20%, got 0.21%"),
        ({"error": float("nan")}, "demo: error of FFN up product, FP6, must be at most 0.20%, got nan%"),
        ({"weight_error": 0.05}, "demo: error of the weights, FP6, must be at most 4.00%, got 5.00%"),
        ({"block_error": 0.25}, "demo: error of the block, FP6, must be at most 20.00%, got 25.00%"),
    ],
)
def test_demo_fails_by_name_where_an_error_exceeds_its_limit(
    changes: dict[str, float], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_compare, "run", lambda *args: {"FP8": result(), "FP6": result(**changes)})
    assert __main__.main(["demo", "--tokens", "1"]) == 1
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("demo:")] == [line]
    assert "All errors are within" not in out


def test_demo_shows_the_copies_that_it_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_compare, "run", lambda *args: {"FP8": result(), "FP6": result()})
    assert __main__.main(["demo", "--tokens", "1"]) == 0
    assert re.search(r"to cuda +copy +1.0 MB +2.00 us +2.00 us", capsys.readouterr().out)


def test_durations() -> None:
    texts = ["2.00 us", "99.9 us", "1.00 ms", "12.3 ms", "457 ms", "1.25 s"]
    assert [_demo._duration(seconds) for seconds in (2e-6, 99.9e-6, 1e-3, 12.34e-3, 0.4567, 1.25)] == texts


@pytest.mark.parametrize(
    ("absent", "arguments", "install"),
    [
        (["rich"], ["demo"], "rich"),
        (["matplotlib"], ["demo", "--save", "out.png"], "matplotlib"),
        (["rich", "matplotlib"], ["demo", "--save", "out.png"], "rich matplotlib"),
    ],
)
def test_demo_without_its_extra_says_what_to_install(
    absent: list[str],
    arguments: list[str],
    install: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in absent:
        monkeypatch.setattr(__main__, "find_spec", lambda name: None if name in absent else True)
    assert __main__.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err == f"demo: needs the extra [demo]: pip install {install}\n"
    assert captured.out == ""


def test_info_does_without_the_extra() -> None:
    program = "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = None; "
    program += "from ltx_kernels.__main__ import main; sys.exit(main(['info']))"
    run = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("ltx-kernels ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["bench"], "invalid choice: 'bench'"),
        (["demo", "--tokens", "0"], "--tokens: must be a whole number above 0, got '0'"),
        (["demo", "--tokens", "-3"], "--tokens: must be a whole number above 0, got '-3'"),
        (["demo", "--tokens", "1e3"], "--tokens: must be a whole number above 0, got '1e3'"),
        (["demo", "--save", "out.jpg"], "--save: must end in .png, got 'out.jpg'"),
        (["demo", "--save", "nowhere/out.png"], "--save: must be in an existing folder, got 'nowhere/out.png'"),
        (["info", "--tokens", "3"], "unrecognized arguments: --tokens 3"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        __main__.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def report() -> dict:
    run = command("info", "--json", "--self-test")
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def test_info_has_the_versions_and_the_build(report: dict) -> None:
    assert set(report) == {
        "versions",
        "built_architectures",
        "devices",
        "peer_access",
        "ops",
        "transports",
        "self_test",
    }
    versions = report["versions"]
    assert set(versions) == {"ltx_kernels", "python", "torch", "torch_cuda", "triton", "driver"}
    assert versions["torch"] == torch.__version__ and versions["torch_cuda"] == torch.version.cuda
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(re.fullmatch(r"(sm|compute)_\d+a?", name) for name in report["built_architectures"])


def test_info_lists_each_device_and_peer(report: dict) -> None:
    count = torch.cuda.device_count()
    assert [set(device) for device in report["devices"]] == [{"name", "capability", "memory_bytes", "lacks"}] * count
    assert [len(row) for row in report["peer_access"]] == [count] * count
    assert all(report["peer_access"][i][i] for i in range(count))


def test_info_agrees_with_get_backend(report: dict) -> None:
    assert list(report["ops"]) == list(BACKENDS)
    for op, reasons in report["ops"].items():
        assert list(reasons)[:3] == ["cpu", "cuda", "triton"]
        assert reasons["cpu"] == "" and get_backend(op, "cpu") == "cpu"
        if "triton" not in BACKENDS[op]:
            assert reasons["triton"] == "no code"
        if torch.cuda.is_available():
            try:
                assert (get_backend(op, "cuda") == "cuda") == (reasons["cuda"] == "")
            except RuntimeError:
                assert reasons["cuda"] != ""
        if not torch.cuda.is_available():
            assert reasons["cuda"] in ("no code", "no GPU", "built without CUDA code")


def test_info_lists_the_transports_of_all2all(report: dict) -> None:
    transports = report["transports"]
    assert set(transports) == {"ipc", "nccl", "shm"}
    assert transports["shm"] == "" and "not been run on a GPU" in transports["ipc"]
    for name, reason in transports.items():
        if not reason:
            assert All2All(0, 1, 1, 1, 1, torch.float32, transport=name).transport == name
        else:
            with pytest.raises(RuntimeError, match=re.escape(reason)):
                All2All(0, 1, 1, 1, 1, torch.float32, transport=name)


def test_self_test_covers_every_op_on_every_backend_that_runs(report: dict) -> None:
    runs = {(op, name) for op, reasons in report["ops"].items() for name, why in reasons.items() if not why}
    assert {(test["op"], test["backend"]) for test in report["self_test"]} == runs
    assert len(report["self_test"]) == len(runs)
    for test in report["self_test"]:
        assert set(test) == {"op", "backend", "error", "limit", "reason"}
        assert test["reason"] == ""
        if test["op"] in ("fp6_pack", "fp6_unpack"):
            assert test["error"] is None
        else:
            assert 0 < test["error"] < test["limit"]


def quantize_wrong(x: torch.Tensor, *, gelu: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    q, scales = torch.ops.ltx_kernels.quantize(x, None)
    return q, scales * 1.1


def raise_by_name(*args: object, **kwargs: object) -> None:
    raise RuntimeError("fp6_pack: something is broken")


@pytest.mark.parametrize(
    ("op", "name", "broken", "reason"),
    [
        ("quantize", "blockwise_quantize", quantize_wrong, r"error must be at most 4\.\de-02, got 1\.0e-01"),
        ("fp6_pack", "fp6_pack_tensor", lambda x: x[:, :3], "bytes differ"),
        ("fp6_pack", "fp6_pack_tensor", raise_by_name, "fp6_pack: something is broken"),
        ("fp6_pack", "fp6_pack_tensor", lambda x: None, "'NoneType' object has no attribute 'cpu'"),
    ],
)
def test_a_broken_op_fails_the_self_test_by_name(
    op: str,
    name: str,
    broken: object,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(functional, name, broken)
    assert __main__.main(["info", "--self-test"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert any(re.match(rf"{op} +cpu .*FAILED: {reason}", line) for line in lines)


def test_self_test_restores_the_choice_of_backends() -> None:
    (outcome,) = _self_test.run([("quantize", "cpu")])
    assert outcome.reason == ""
    from ltx_kernels import _backends

    assert _backends._forced == {}


def test_info_text_of_a_machine_with_two_gpus() -> None:
    gpu = {"name": "GPU A", "capability": "9.0", "memory_bytes": 140 * 2**30, "lacks": ""}
    old = {"name": "GPU B", "capability": "7.5", "memory_bytes": 16 * 2**30, "lacks": "device 1 is sm_75"}
    text = _info._text(
        {
            "versions": dict.fromkeys(["ltx_kernels", "python", "torch", "torch_cuda", "triton", "driver"]),
            "built_architectures": ["sm_80", "sm_90a"],
            "devices": [gpu, old],
            "peer_access": [[True, False], [False, True]],
            "ops": {"quantize": {"cpu": "", "cuda": "no code", "triton": ""}},
            "transports": {"nccl": "", "ipc": "not yet"},
        }
    )
    assert "  CUDA code for  sm_80 sm_90a\n" in text
    assert "  cuda:0  GPU A, capability 9.0, 140 GiB\n" in text
    assert "  cuda:1  GPU B, capability 7.5, 16 GiB, cannot be used: device 1 is sm_75\n" in text
    assert "     0   1\n 0 yes  no\n 1  no yes\n" in text
    assert re.search(r"^quantize +yes +no code +yes$", text, re.MULTILINE)
    assert re.search(r"^Transport of All2All\nnccl +yes\nipc +not yet$", text, re.MULTILINE)
