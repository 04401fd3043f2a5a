"""The README: its example runs and its table is what the demo prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from ltx_kernels import blockwise
from ltx_kernels._block import STEPS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs_and_prints_what_its_comments_say() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})  # noqa: S102
    off, backend = printed.getvalue().splitlines()
    assert re.fullmatch(r"cpu: off by 3\.\d%", off)
    assert re.search(r"# cpu: off by 3\.\d%$", example, re.MULTILINE)
    assert backend == "cpu"


def test_the_demo_table_has_the_steps_of_the_demo() -> None:
    (table,) = re.findall(
        r"^One video block of LTX-2.*?^All errors are within their limits\.", README, re.MULTILINE | re.DOTALL
    )
    steps = re.findall(r"^(\S.*?)  +\w+ +256×\d+ ", table, re.MULTILINE)
    assert steps == [step.title for step in STEPS]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+)\b[^`]*`", README)) & set(dir(blockwise))))
def test_names_are_public(name: str) -> None:
    assert name in blockwise.__all__


def test_every_public_name_is_in_the_overview() -> None:
    (overview,) = re.findall(r"^\| `ltx_kernels\.blockwise` \|.*?\n\n", README, re.MULTILINE | re.DOTALL)
    unnamed = {"gemm_config", "rms_norm_rope_qk", "rms_norm_split_rope_qk"}  # "and their _qk forms"
    assert {name for name in blockwise.__all__ if not re.search(rf"\b{name}\b", overview)} <= unnamed


def test_the_excerpt_is_of_the_example() -> None:
    (excerpt,) = re.findall(r"^```py\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert excerpt in (Path(__file__).parent.parent / "examples/ulysses_attention.py").read_text()


@pytest.mark.parametrize("path", re.findall(r"\]\((docs/[\w.]+)\)", README))
def test_links_lead_somewhere(path: str) -> None:
    assert (Path(__file__).parent.parent / path).is_file()
