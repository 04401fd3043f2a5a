"""The exchange protocol's model, csrc/all2all/exchange.pml, checked by spin: all orders of all steps of a few ranks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent.parent / "csrc/all2all/exchange.pml"

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(shutil.which("spin") is None, reason="no spin on PATH (Debian and Ubuntu: package spin)"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler cc on PATH"),
]


def check(folder: Path, *definitions: str) -> str:
    """What spin's verifier says of the model with these definitions."""
    subprocess.run(["spin", *definitions, "-a", MODEL], cwd=folder, check=True, capture_output=True)
    subprocess.run(["cc", "-O2", "-w", "-DSAFETY", "-o", "pan", "pan.c"], cwd=folder, check=True)
    return subprocess.run(["./pan", "-m100000"], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "definitions",
    [
        ("-DN=2",),
        ("-DN=2", "-DDIE"),
        ("-DN=2", "-DIMPATIENT"),
        ("-DN=2", "-DLOCAL"),
        ("-DN=3", "-DCALLS=2"),
        ("-DN=3", "-DCALLS=2", "-DDIE"),
        ("-DN=3", "-DCALLS=2", "-DIMPATIENT"),
        ("-DN=3", "-DLOCAL"),
    ],
    ids=" ".join,
)
def test_no_early_overwrite_and_no_deadlock(definitions: tuple[str, ...], tmp_path: Path) -> None:
    report = check(tmp_path, *definitions)
    assert re.search(r"errors: 0$", report, re.MULTILINE), report
    assert "max search depth too small" not in report  # it has seen all
    states = re.search(r"(\d+) states, stored", report)
    assert states is not None and int(states[1]) > 10_000


@pytest.mark.parametrize(
    ("mutation", "rule"),
    [
        # Stores that do not wait until the last result in the slot is consumed.
        ("-DNO_ACK", r"data\[.*\]==e"),
        # Stores that do not wait until the peer has the memory.
        ("-DNO_ROOM", r"\(large!=e\)\|\|room\[p\]"),
        # A rank that lets peers overwrite its last result before its next push has read it.
        ("-DEARLY", r"data\[.*\]==reading"),
    ],
)
def test_the_model_rejects_a_protocol_without_its_waits(mutation: str, rule: str, tmp_path: Path) -> None:
    report = check(tmp_path, mutation)
    assert re.search(r"errors: 1$", report, re.MULTILINE), report
    assert re.search(rf"assertion violated .*{rule}", report), report
