"""`python -m ltx_kernels info`: what this build holds, what this machine has, and what therefore runs."""

import json
import platform
import subprocess
from dataclasses import asdict
from typing import Any

import torch

import ltx_kernels
from ltx_kernels import _self_test, all2all
from ltx_kernels._backends import BACKENDS, backend_lacks

COLUMNS = ("cpu", "cuda", "triton", "dequantize")


def main(as_json: bool, self_test: bool) -> int:
    """Prints the report. 1 if a self-test failed, else 0."""
    report = gather()
    if self_test:
        available = [(op, name) for op, reasons in report["ops"].items() for name, why in reasons.items() if not why]
        report["self_test"] = [asdict(result) for result in _self_test.run(available)]
    print(json.dumps(report, indent=2) if as_json else _text(report))
    return 1 if any(result["reason"] for result in report.get("self_test", [])) else 0


def gather() -> dict[str, Any]:
    """The report as JSON has it. A backend of an op has the reason why it does not run, or an empty string."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "versions": {
            "ltx_kernels": ltx_kernels.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "triton": _triton_version(),
            "driver": _driver_version(),
        },
        "built_architectures": torch.ops.ltx_kernels.built_architectures().split(),
        "devices": [_device(device) for device in devices],
        "peer_access": [[a == b or torch.cuda.can_device_access_peer(a, b) for b in devices] for a in devices],
        "ops": {op: {name: _why_not(op, name, devices) for name in _columns(op)} for op in BACKENDS},
        "transports": {name: all2all.transport_lacks(name) for name in all2all.TRANSPORTS if name != "auto"},
    }


def _columns(op: str) -> tuple[str, ...]:
    return COLUMNS if "dequantize" in BACKENDS[op] else COLUMNS[:-1]


def _why_not(op: str, backend: str, devices: list[torch.device]) -> str:
    """Empty if the backend runs on this machine: on a CPU, or on one of its GPUs at least."""
    if backend in ("cpu", "dequantize"):
        return ""
    if backend not in BACKENDS[op]:
        return "no code"
    if backend == "cuda" and not torch.ops.ltx_kernels.built_architectures():
        return "built without CUDA code"
    if not devices:
        return "no GPU"
    reasons = [backend_lacks(backend, device, op) for device in devices]
    return "" if "" in reasons else reasons[0]


def _device(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "lacks": backend_lacks("cuda", device),
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0] if answer.stdout else None


def _text(report: dict[str, Any]) -> str:
    versions = report["versions"]
    lines = [
        f"ltx-kernels {versions['ltx_kernels']}",
        f"  Python         {versions['python']}",
        f"  torch          {versions['torch']}, its CUDA {versions['torch_cuda'] or 'none'}",
        f"  triton         {versions['triton'] or 'none'}",
        f"  driver         {versions['driver'] or 'none'}",
        f"  CUDA code for  {' '.join(report['built_architectures']) or 'nothing (built for CPUs)'}",
        "",
        "Devices" if report["devices"] else "No GPU",
    ]
    for index, device in enumerate(report["devices"]):
        memory = f"{device['memory_bytes'] / 2**30:.0f} GiB"
        lines.append(
            f"  cuda:{index}  {device['name']}, capability {device['capability']}, {memory}"
            f"{', cannot be used: ' + device['lacks'] if device['lacks'] else ''}"
        )
    if len(report["devices"]) > 1:
        indices = range(len(report["devices"]))
        lines += ["", "Peer access (from the row's device to the column's)", "  " + "".join(f"{i:4}" for i in indices)]
        lines += [
            f"{i:2}" + "".join(" yes" if able else "  no" for able in row)
            for i, row in enumerate(report["peer_access"])
        ]
    widths = {name: max(len(ops.get(name) or "yes") for ops in report["ops"].values()) for name in COLUMNS}
    lines += ["", f"{'Op':24}" + "  ".join(f"{name:{widths[name]}}" for name in COLUMNS)]
    for op, reasons in report["ops"].items():
        cells = (f"{why or 'yes':{widths[name]}}" for name, why in reasons.items())
        lines.append(f"{op:24}{'  '.join(cells)}".rstrip())
    lines += ["", "Transport of All2All"]
    lines += [f"{name:24}{why or 'yes'}" for name, why in report["transports"].items()]
    if "self_test" in report:
        lines += ["", f"{'Self-test':24}{'backend':12}{'error':>8}{'limit':>9}"]
        lines += [_self_test_line(result) for result in report["self_test"]]
    return "\n".join(lines)


def _self_test_line(result: dict[str, Any]) -> str:
    error, limit = (f"{number:.1e}" if number is not None else "" for number in (result["error"], result["limit"]))
    verdict = f"FAILED: {result['reason']}" if result["reason"] else "passed"
    return f"{result['op']:24}{result['backend']:12}{error:>8} {limit:>8}  {verdict}"
