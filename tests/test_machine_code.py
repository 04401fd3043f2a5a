"""The machine code in the built modules, read without a GPU: what must not be in it, and what must."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

import ltx_kernels

pytestmark = pytest.mark.build


@dataclass(frozen=True)
class Kernel:
    """What holds for each kernel whose mangled name matches a pattern.

    `instructions` are patterns that must each be found in at least one instance: a kernel made for several vector widths
    has 16-byte accesses in the widest alone.
    """

    module: str
    name: str
    instructions: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


LOAD_16 = r"\bLDG\.E\.(\w+\.)*128\b"
STORE_16 = r"\bSTG\.E\.(\w+\.)*128\b"

KERNELS: list[Kernel] = []


@cache
def tool(name: str) -> str | None:
    """A program of NVIDIA's, from the environment's packages or PATH. cuobjdump needs nvdisasm beside it."""
    for folder in sys.path:
        for path in Path(folder).glob(f"nvidia/cu*/bin/{name}"):
            return str(path)
    return shutil.which(name)


@cache
def dump(module: str, option: str) -> str:
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    if not torch.ops.ltx_kernels.built_architectures():
        pytest.skip("this build has no CUDA code")
    if cuobjdump is None or nvdisasm is None:
        pytest.skip("no cuobjdump and nvdisasm")
    library = getattr(ltx_kernels, module).__file__
    return subprocess.run(
        [cuobjdump, option, library], check=True, capture_output=True, text=True, env={"NVDISASM_PATH": str(Path(nvdisasm).parent)}
    ).stdout
