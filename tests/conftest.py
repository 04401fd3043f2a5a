"""Fixtures that every test of an op shares."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from ltx_kernels._backends import BACKENDS

# cmake, uv and the like are found in an environment that is not activated too.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason of a skip."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device of this machine: a test that takes it runs once for each that its module's OP has code for."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    op = getattr(request.module, "OP", None)
    if op is not None and request.param not in BACKENDS[op]:
        pytest.skip(f"{op} has no {request.param} code: BACKENDS[{op!r}] is {BACKENDS[op]}")
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
