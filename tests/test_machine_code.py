"""The machine code in the built modules, read without a GPU: what must not be in it, and what must."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import ltx_kernels
from ltx_kernels import ops_cpp  # noqa: F401  (registers built_architectures)

pytestmark = pytest.mark.build

MODULES = ("ops_cpp", "blockwise_cpp", "all2all_cpp")
LOAD_16_BYTES = r"\bLDG\.E\.(\w+\.)*128\b"
STORE_16_BYTES = r"\bSTG\.E\.(\w+\.)*128\b"
LOAD_MATRICES = r"\bLDSM\.16\.M88\.4\b"
COPY_16_BYTES = r"\bLDGSTS\.E\.(\w+\.)*128\b"
QMMA_SUM_BITS = r"\bQMMA\.16832\.F(\d+)\.E4M3\.E4M3\b"

# Kernels by a part of their mangled name, and what each instance of them must hold.
KERNELS = [
    ("ops_cpp", "16norm_rope_kernel", LOAD_16_BYTES),
    ("ops_cpp", "15fp6_pack_kernel", LOAD_16_BYTES),
    ("ops_cpp", "15fp6_pack_kernel", STORE_16_BYTES),
    ("ops_cpp", "17fp6_unpack_kernel", LOAD_16_BYTES),
    ("ops_cpp", "17fp6_unpack_kernel", STORE_16_BYTES),
    ("blockwise_cpp", "20fp8_gemm_sm90_kernel", r"\bQGMMA\.64x(64|128)x32\.F32\.E4M3\.E4M3\b"),
    ("blockwise_cpp", "20fp8_gemm_sm90_kernel", r"\bUTMALDG\.2D\b"),
    ("blockwise_cpp", "20fp8_gemm_sm90_kernel", r"\bUTMASTG\.2D\b"),
    ("blockwise_cpp", "20fp8_gemm_sm89_kernel", LOAD_MATRICES),
    ("blockwise_cpp", "20fp8_gemm_sm89_kernel", COPY_16_BYTES),
    # Those that read in lanes: the instances for tensors of any alignment read value by value.
    *(
        ("blockwise_cpp", f"{kernel}I{dtype}", LOAD_16_BYTES)
        for kernel in (
            "15quantize_kernel",
            "22gated_attention_kernel",
            "23adanorm_quantize_kernel",
            "14rms_fma_kernel",
            "23quantize_weights_kernel",
        )
        for dtype in ("13__nv_bfloat16", "6__half", "f")
    ),
    ("blockwise_cpp", "14rms_fma_kernelI13__nv_bfloat16", STORE_16_BYTES),
    ("blockwise_cpp", "17dequantize_kernelI13__nv_fp8_e4m3", STORE_16_BYTES),
    ("all2all_cpp", "11push_kernelI5uint4", LOAD_16_BYTES),
    ("all2all_cpp", "11push_kernelI5uint4", STORE_16_BYTES),
]


def find(program: str) -> str | None:
    packaged = (Path(folder) / "nvidia/cu13/bin" / program for folder in sys.path)
    return next((str(path) for path in packaged if path.exists()), shutil.which(program))


def dump(path: Path, option: str) -> dict[tuple[str, str], str]:
    """What cuobjdump says of each kernel in a file, by architecture and mangled name."""
    cuobjdump, nvdisasm = find("cuobjdump"), find("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        pytest.skip("no cuobjdump or no nvdisasm")
    env = {"NVDISASM_PATH": str(Path(nvdisasm).parent)}
    text = subprocess.run([cuobjdump, option, path], check=True, capture_output=True, text=True, env=env).stdout
    found = {}
    for section in text.split("\narch = ")[1:]:
        arch = section.split()[0]
        for part in re.split(r"\n\s+Function ?(?=[: ])", section)[1:]:
            name, body = part.lstrip(": ").split("\n", 1)
            found[arch, name.rstrip(":")] = body
    return found


@cache
def kernels(module: str, option: str) -> dict[tuple[str, str], str]:
    """Those of a module."""
    if not torch.ops.ltx_kernels.built_architectures():
        pytest.skip("this build has no CUDA code")
    return dump(Path(getattr(ltx_kernels, module).__file__), option)


def local_memory(usage: dict[tuple[str, str], str]) -> dict[tuple[str, str], str | None]:
    """The kernels that spill or use local memory, or of which it is not said."""
    memory = {kernel: re.search(r"STACK:(\d+) .*LOCAL:(\d+)", text) for kernel, text in usage.items()}
    return {kernel: found and found[0] for kernel, found in memory.items() if not found or found.groups() != ("0", "0")}


@pytest.mark.parametrize("module", MODULES)
def test_holds_code_for_each_architecture_that_was_asked_for(module: str) -> None:
    built = set(torch.ops.ltx_kernels.built_architectures().split())
    assert {arch for arch, _ in kernels(module, "--dump-resource-usage")} == {
        arch for arch in built if arch.startswith("sm_")
    }


@pytest.mark.parametrize("module", MODULES)
def test_no_kernel_spills_or_uses_local_memory(module: str) -> None:
    usage = kernels(module, "--dump-resource-usage")
    # 9.0 and 10.x emulate mma.sync of e4m3, which takes more registers than there are: only tests run it there.
    native = {
        (arch, name): text
        for (arch, name), text in usage.items()
        if "fp8_gemm_sm89" not in name or not arch.startswith(("sm_90", "sm_10"))
    }
    assert native
    assert local_memory(native) == {}


@pytest.mark.parametrize(("module", "name", "instruction"), KERNELS)
def test_kernel_holds_the_instruction(module: str, name: str, instruction: str) -> None:
    if "sm90" in name and "sm_90a" not in torch.ops.ltx_kernels.built_architectures().split():
        pytest.skip("this build has no code for sm_90a")
    built = torch.ops.ltx_kernels.built_architectures()
    if "sm89" in name and all(int(number) < 89 for number in re.findall(r"\d+", built)):
        pytest.skip("this build has no code for 8.9 or newer")
    instances = {kernel: code for kernel, code in kernels(module, "-sass").items() if name in kernel[1]}
    assert instances
    assert [kernel for kernel, code in instances.items() if not re.search(instruction, code)] == []


def test_wgmmas_of_a_k_block_run_without_waiting_for_each_other() -> None:
    """A small change of the source can make ptxas put a wait after every one (its remark C7514)."""
    instances = {
        kernel: code for kernel, code in kernels("blockwise_cpp", "-sass").items() if "fp8_gemm_sm90" in kernel[1]
    }
    if not instances:
        pytest.skip("this build has no code for sm_90a")
    starts = {kernel: code.count("WARPGROUP.ARRIVE") for kernel, code in instances.items()}
    assert {kernel: code.count("QGMMA") for kernel, code in instances.items()} == {
        kernel: 4 * count for kernel, count in starts.items()
    }


def assert_multiplies_by_qmma(instances: dict[str, str]) -> None:
    """Those with the template argument true by the one whose sums are half precision."""
    bits = {name: set(re.findall(QMMA_SUM_BITS, code)) for name, code in instances.items()}
    assert bits == {name: {"16" if "Lb1E" in name else "32"} for name in instances}


def test_sm89_kernel_on_ada_multiplies_by_qmma() -> None:
    """9.0 has no such instruction, and emulates it."""
    instances = {
        name: code
        for (arch, name), code in kernels("blockwise_cpp", "-sass").items()
        if arch == "sm_89" and "fp8_gemm_sm89" in name
    }
    if not instances:
        pytest.skip("this build has no code for sm_89")
    assert_multiplies_by_qmma(instances)


def test_sm89_kernel_on_consumer_blackwell(tmp_path: Path) -> None:
    """12.0 is compiled for this source alone, by the build's own command: all else would double the build's time."""
    commands = Path(__file__).parents[1] / "build/editable/compile_commands.json"
    entries = json.loads(commands.read_text()) if commands.exists() else []
    entry = next((entry for entry in entries if entry["file"].endswith("/fp8_gemm_sm89.cu")), None)
    if entry is None:
        pytest.skip("needs an editable build with CUDA code for 8.9 or newer")
    words = shlex.split(entry["command"])
    options = [word for word in words[: words.index("-x")] if not word.startswith("--generate-code=")]
    target = ["--generate-code=arch=compute_120,code=sm_120", "--fatbin"]
    binary = tmp_path / "sm_120.fatbin"
    subprocess.run([*options, *target, "-o", binary, entry["file"]], check=True, cwd=entry["directory"])
    code, usage = dump(binary, "-sass"), dump(binary, "--dump-resource-usage")
    assert len(code) == 18 and {arch for arch, _ in code} == {"sm_120"}  # 3 configurations, 3 dtypes, 2 kinds of sums
    assert_multiplies_by_qmma({name: text for (_, name), text in code.items()})
    for instruction in (LOAD_MATRICES, COPY_16_BYTES):
        assert [name for name, text in code.items() if not re.search(instruction, text)] == []
    assert usage.keys() == code.keys() and local_memory(usage) == {}
