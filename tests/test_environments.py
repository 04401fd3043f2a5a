"""The package built and installed in the ways that the README tells, in environments of their own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(
        os.environ.get("LTX_TEST_ENVIRONMENTS") != "ON",
        reason="downloads several GB into new environments: LTX_TEST_ENVIRONMENTS=ON runs it",
    ),
    pytest.mark.skipif(shutil.which("uv") is None, reason="no uv on PATH"),
]

SMOKE_TEST = """
import sys
import torch
import ltx_kernels
from ltx_kernels import all2all_cpp, blockwise_cpp, ops_cpp
from ltx_kernels.blockwise import fp6_pack_tensor, fp6_unpack_tensor, rms_norm_split_rope
codes = torch.arange(64, dtype=torch.uint8).reshape(1, 64)
values = codes & 31 | (codes & 32) << 2
assert torch.equal(fp6_unpack_tensor(fp6_pack_tensor(values), 64), values)
x = torch.tensor([[[3.0, 4.0]]])
table = torch.ones(1, 1, 1, 1)
y = rms_norm_split_rope(x, table, torch.zeros_like(table), eps=1e-30)
torch.testing.assert_close(y.float(), x / 12.5**0.5, atol=0, rtol=2**-8)
print(ltx_kernels.__version__, sys.version_info[:2], torch.__version__)
"""


def run(*command: object, cwd: Path = ROOT) -> str:
    """Runs a command that sees no environment but its own, CPU code only. Returns what it prints."""
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "LTX_TESTS", "PYTHONPATH")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        env=env | {"LTX_CUDA": "OFF"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def offline_is_a_skip(*command: object, cwd: Path = ROOT) -> str:
    """As run(), for what needs packages from the network."""
    try:
        return run(*command, cwd=cwd)
    except AssertionError as error:
        unreachable = re.search(r"(error sending request|dns error|Failed to (?:download|fetch)).*", str(error))
        if unreachable:
            pytest.skip(f"no package registry: {unreachable[0]}")
        raise


def find_python(version: str) -> str:
    """An interpreter on PATH or of pyenv."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "--version"], check=False, capture_output=True).returncode == 0:
            return str(candidate)
    pytest.skip(f"no Python {version} on PATH or in ~/.pyenv/versions")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources without anything built, unpacked from an sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", f"import scikit_build_core.build as build; build.build_sdist({str(folder)!r})")
    archive = next(folder.glob("*.tar.gz"))
    assert archive.stat().st_size < 2e6
    shutil.unpack_archive(archive, folder)
    tree = folder / archive.name.removesuffix(".tar.gz")
    assert not {".venv", "build", "dist", ".git"} & {path.name for path in tree.iterdir()}
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that an isolated build makes of the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    offline_is_a_skip("uv", "build", "--wheel", "--out-dir", folder, "--python", sys.executable, tree)
    return next(folder.glob("*-cp310-abi3-linux_*.whl"))


@pytest.mark.parametrize(("python", "torch"), [("3.10", "torch==2.11.0"), ("3.13", "torch")])
def test_one_wheel_runs_on_each_python_and_torch(python: str, torch: str, wheel: Path, tmp_path: Path) -> None:
    interpreter = find_python(python)
    environment = tmp_path / "environment"
    run("uv", "venv", "--python", interpreter, environment)
    offline_is_a_skip("uv", "pip", "install", "--python", environment, torch, "numpy", wheel)
    printed = run(environment / "bin/python", "-c", SMOKE_TEST, cwd=tmp_path)
    assert f"({python.replace('.', ', ')})" in printed


def test_editable_by_uv_without_isolation(tree: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run("uv", "venv", "--python", sys.executable, environment)
    install = ("uv", "pip", "install", "--python", environment)
    offline_is_a_skip(*install, "--group", "build", "pip", cwd=tree)
    run(*install, "--no-build-isolation", "--editable", ".", cwd=tree)
    printed = run(
        environment / "bin/python", "-c", f"import ltx_kernels; print(ltx_kernels.__file__)\n{SMOKE_TEST}", cwd=tmp_path
    )
    assert str(tree / "src/ltx_kernels") in printed


WORKSPACE = """
[project]
name = "workspace"
version = "0"
requires-python = ">=3.10"

[dependency-groups]
kernels = ["ltx-kernels"]

[tool.uv.workspace]
members = ["app"]
exclude = ["ltx-kernels"]

[tool.uv.sources]
ltx-kernels = { path = "ltx-kernels", editable = true }
"""
APP = """
[project]
name = "app"
version = "0"
requires-python = ">=3.10"
"""


def test_uv_workspace(tree: Path, tmp_path: Path) -> None:
    kernels = tmp_path / "ltx-kernels"
    shutil.copytree(tree, kernels, ignore=shutil.ignore_patterns("build"))
    (tmp_path / "pyproject.toml").write_text(WORKSPACE)
    (tmp_path / "app").mkdir()
    (tmp_path / "app/pyproject.toml").write_text(APP)
    sync = ("uv", "sync", "--python", sys.executable)
    python = tmp_path / ".venv/bin/python"
    has_kernels = "import importlib.util as util; print(util.find_spec('ltx_kernels') is not None)"

    offline_is_a_skip(*sync, cwd=tmp_path)
    assert run(python, "-c", has_kernels, cwd=tmp_path) == "False\n"
    assert not (kernels / "build").exists()

    offline_is_a_skip(*sync, "--group", "kernels", cwd=tmp_path)
    run(python, "-c", SMOKE_TEST, cwd=tmp_path)
    assert (kernels / "build").exists()

    run(*sync, cwd=tmp_path)
    assert run(python, "-c", has_kernels, cwd=tmp_path) == "False\n"
