"""The programs of examples/ run, and find what they say that they find."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ULYSSES = Path(__file__).parent.parent / "examples/ulysses_attention.py"

pytestmark = pytest.mark.build  # each process of theirs imports torch, which takes long under a sanitizer


@pytest.mark.parametrize(
    "command",
    [
        (ULYSSES, "--ranks", "2"),
        (ULYSSES, "--ranks", "1"),
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", ULYSSES),
    ],
    ids=["started_by_itself", "one_rank", "torchrun"],
)
def test_ulysses_attention(command: tuple[object, ...]) -> None:
    arguments = ("--tokens", "100", "--heads", "7", "--head-dim", "16", "--device", "cpu")
    run = subprocess.run([sys.executable, *map(str, command), *arguments], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^100 tokens on \d ranks? \[.*\], 7 heads \[.*\], on cpu\n", run.stdout)
    found = re.search(r"ms; largest difference from attention in one process: (\S+)$", run.stdout, re.MULTILINE)
    assert found is not None and float(found[1]) < 0.01
