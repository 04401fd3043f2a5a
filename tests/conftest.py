"""Fixtures that every test of an op shares."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ltx_kernels._backends import BACKENDS, backend_lacks, set_backend

MOST_INTERPRETED_ROWS = 1000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the tests on Triton of ops that Triton is not to serve."""
    items[:] = [
        item
        for item in items
        if not item.get_closest_marker("triton") or "triton" in BACKENDS.get(getattr(item.module, "OP", ""), ())
    ]


# cmake, uv and the like are found in an environment that is not activated too.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason of a skip."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(params=["cpu", "cuda", pytest.param("triton", marks=pytest.mark.triton)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device of this machine: a test that takes it runs once for each that its module's OP has code for.

    "triton" is the GPU with all ops that Triton can serve forced to it, or the CPU in Triton's interpreter.
    """
    backend = request.param
    if backend == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    op = getattr(request.module, "OP", None)
    if op is not None and backend not in BACKENDS[op]:
        pytest.skip(f"{op} has no {backend} code: BACKENDS[{op!r}] is {BACKENDS[op]}")
    if backend == "cuda" and op is not None and not backend_lacks("cuda", torch.device("cuda")):
        reason = backend_lacks("cuda", torch.device("cuda"), op)
        if reason:
            pytest.skip(f"{op} {reason}")
    if backend != "triton":
        yield backend
        return
    device = "cuda" if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET") else "cpu"
    reason = backend_lacks("triton", torch.device(device))
    if reason:
        pytest.skip(reason)
    case = request.node.callspec.params.get("case")
    if device == "cpu" and case and case.batch * case.tokens > MOST_INTERPRETED_ROWS:
        pytest.skip(f"triton's interpreter is slow: cases of up to {MOST_INTERPRETED_ROWS} rows")
    served = [op for op, backends in BACKENDS.items() if "triton" in backends]
    for op in served:
        set_backend(op, "triton")
    yield device
    for op in served:
        set_backend(op, None)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
