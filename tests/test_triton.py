"""What is Triton's own: its number formats, how rows are found, what is compiled, and when it is chosen."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import E4M3_MAGNITUDES, assert_bits, nearest_e4m3
from torch import Tensor

from ltx_kernels._backends import get_backend, set_backend
from ltx_kernels.blockwise import blockwise_quantize, functional

triton = pytest.importorskip("triton")
import triton.language as tl

from ltx_kernels.blockwise.triton import numbers
from ltx_kernels.blockwise.triton.launch import launch, rows_of

on_triton = pytest.mark.parametrize("device", [pytest.param("triton", marks=pytest.mark.triton)], indirect=True)
OP = "quantize"


@triton.jit
def number_kernel(x, out, count, FUNCTION: tl.constexpr):
    places = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    values = tl.load(x + places, places < count, other=0)
    if FUNCTION == "encode_e4m3":
        result = numbers.encode_e4m3(values)
    elif FUNCTION == "decode_e4m3":
        result = numbers.decode_e4m3(values)
    elif FUNCTION == "to_float32":
        result = numbers.to_float32(values)
    else:
        result = numbers.rounded(values, out.dtype.element_ty)
    tl.store(out + places, result, places < count)


def apply(function: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    launch(number_kernel, -(-x.numel() // 1024), x, out, x.numel(), FUNCTION=function)
    return out.cpu()


def kinds_of_fp32() -> Tensor:
    """Each sign, exponent and 7 upper mantissa bits, with the lower 16 on, next to and between all ties."""
    upper, lower = torch.arange(2**16), torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = upper[:, None] << 16 | lower
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).flatten().view(torch.float32)


@on_triton
def test_encoder(device: str) -> None:
    x = kinds_of_fp32()
    x = x[x.isfinite()]
    bytes_ = apply("encode_e4m3", x.to(device), torch.uint8)
    assert_bits(bytes_, nearest_e4m3(x))
    assert bytes_.unique().numel() == 254
    small = x[x.abs() <= 448]
    rows = torch.nn.functional.pad(small, (0, -len(small) % 127)).view(-1, 127)
    rows = torch.cat([torch.full((len(rows), 1), 448.0), rows], dim=1)  # the scale of each block is 1
    set_backend("quantize", None)
    q, _ = blockwise_quantize(rows)
    assert_bits(q[:, 1:].flatten()[: len(small)].view(torch.uint8), bytes_[x.abs() <= 448])


@on_triton
def test_decoder(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = apply("decode_e4m3", codes.to(device), torch.float32)
    assert values[[127, 255]].isnan().all()
    assert_bits(values[:127], E4M3_MAGNITUDES.float())
    assert_bits(values[128:255], -E4M3_MAGNITUDES.float())


@on_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding(dtype: torch.dtype, device: str) -> None:
    x = kinds_of_fp32()
    rounded = apply("rounded", x.to(device), dtype)
    assert torch.equal(rounded.isnan(), x.isnan())
    assert_bits(rounded[~x.isnan()], x[~x.isnan()].to(dtype))
    if dtype == torch.bfloat16:
        assert (rounded[x.isnan()].view(torch.int16) == 0x7FC0).all()


@on_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_widening(dtype: torch.dtype, device: str) -> None:
    x = torch.arange(2**16).to(torch.uint16).view(dtype)
    wide = apply("to_float32", x.to(device), torch.float32)
    assert_bits(wide[~x.isnan()], x[~x.isnan()].float())
    assert wide[x.isnan()].isnan().all()


@given(
    sizes=st.lists(st.integers(1, 4), max_size=4),
    order=st.permutations(range(4)),
    broadcast=st.lists(st.booleans(), min_size=4, max_size=4),
    steps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
    fewer=st.integers(0, 4),
)
def test_rows_lie_where_their_strides_say(
    sizes: list[int], order: list[int], broadcast: list[bool], steps: list[int], fewer: int
) -> None:
    """Against torch's own indexing of a permuted and sliced tensor and of one that broadcasts to it."""
    rank = len(sizes)
    order = [dim for dim in order if dim < rank]
    wide = torch.arange(math.prod(2 * size for size in sizes) * 3).view(*(2 * sizes[dim] for dim in order), 3)
    x = wide.permute(*(order.index(dim) for dim in range(rank)), rank)
    x = x[tuple(slice(0, size * step, step) for size, step in zip(sizes, steps, strict=False))]
    small_sizes = [1 if small else size for size, small in zip(sizes, broadcast, strict=False)][fewer:]
    y = torch.arange(math.prod(small_sizes) * 3).view(*small_sizes, 3)
    inner, *all_strides = rows_of(x, y)
    for tensor, strides in zip((x, y.expand(*sizes, 3)), all_strides, strict=True):
        offsets = []
        for row in range(math.prod(sizes)):
            offset, rest = 0, row
            for size, stride in zip(inner, strides, strict=False):
                offset, rest = offset + rest % size * stride, rest // size
            offsets.append(offset + rest * strides[-1])
        assert offsets == tensor[..., 0].flatten().tolist()


def test_rows_that_lie_evenly_are_one_dimension() -> None:
    x = torch.zeros(2, 5, 3, 8)
    assert rows_of(x) == ((), (8,))
    assert rows_of(x[..., :4]) == ((), (8,))
    assert rows_of(x, torch.zeros(2, 1, 3, 8)) == ((3, 5), (8, 24, 120), (8, 0, 24))
    assert rows_of(x[0, 0, 0]) == ((), (0,))


PROGRAM = """
import re, sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", int(sys.argv[1]), 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

compiled, kernels = [], set()

def compile_alone(kernel, grid):
    def run(*args, **options):
        kernels.add(kernel)
        compiled.append(kernel.warmup(*args, **options, grid=grid).asm)
    return run

driver.set_active(Driver())
JITFunction.__getitem__ = compile_alone
import ltx_kernels.blockwise.triton
ops = torch.ops.ltx_kernels
"""


def compile_without_gpu(program: str, architecture: int, cache: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM + program, str(architecture)]
    result = subprocess.run(
        command, env=env | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("architecture", [80, 90])
def test_compiles_for_a_gpu_that_is_not_here(architecture: int, tmp_path: Path) -> None:
    """And what must hold of the machine's code: no fused multiply-add but the written ones, no flush to zero where bits
    must agree, one load of each input, e4m3 by hardware from sm_89 on."""
    compile_without_gpu(
        """
x, w = torch.zeros(2, 64, 4096).bfloat16(), torch.zeros(256, 4096).bfloat16()
one, logits = x[:, :1].clone(), x[..., :32].contiguous()
q, scales = ops.quantize(x, None)
hardware = int(sys.argv[1]) >= 89
for op, args, loads, fmas, flushes, casts in [
    ("quantize", (x, None), 1, 0, False, True), ("quantize", (x, 1), 1, 0, None, True),
    ("quantize_weights", (w, 128, 0.1172), 1, 0, False, True), ("dequantize", (q, scales), 2, 0, False, True),
    ("dequantize_weights", ops.quantize_weights(w, 128, 448.0), 2, 0, False, True),
    ("adanorm_quantize", (x, None, one, one), 3, 0, None, True),
    ("rms_fma_quantize", (x, x.clone(), one), 3, 16, None, True), ("rms_fma", (x, x.clone(), one), 3, 16, None, False),
    ("gated_attention", (x, logits, True), 2, 0, None, True), ("gated_attention", (x, logits, False), 2, 0, None, False),
]:
    getattr(ops, op + "_triton")(*args)
    ptx, ttir = compiled[-1]["ptx"], compiled[-1]["ttir"]
    assert ttir.count("tt.load") == loads and "scf.for" not in ttir, (op, ttir)
    assert len(re.findall("fma[.]", ptx)) == fmas, op
    assert flushes is None or "ftz" not in ptx, op
    assert not re.search("(mul|add|sub)[.]f32", ptx), op  # without .rn ptxas may fuse them
    assert ("e4m3x2" in ptx) == (hardware and casts), op
""",
        architecture,
        tmp_path,
    )


def test_row_counts_compile_nothing_new(tmp_path: Path) -> None:
    """Nor do batches, ranks or contiguous views of them. Of a modulation for each batch the number of tokens is a
    divisor of the row: it may be a multiple of 16 or not."""
    compile_without_gpu(
        """
for shape in [(1,), (2,), (3,), (16,), (17,), (1000,), (2, 16), (3, 5), (1, 1), (2, 3, 4)]:
    x = torch.zeros(*shape, 256)
    ops.quantize_triton(x, None)
    ops.adanorm_quantize_triton(x, None, x, x)
assert [len(kernel.device_caches[0][0]) for kernel in kernels] == [1, 1]
for tokens in (2, 3, 16, 17, 32, 1000):
    for batch in (2, 3, 16):
        x = torch.zeros(batch, tokens, 256)
        ops.adanorm_quantize_triton(x, None, x[:, :1].clone(), x[:, :1].clone())
assert sorted(len(kernel.device_caches[0][0]) for kernel in kernels) == [1, 3]
""",
        90,
        tmp_path,
    )


@on_triton
def test_forced_and_compiled(device: str) -> None:
    """A graph calls the op that was forced when it ran: set_backend after compilation counts."""
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.append([node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)])
        return graph

    compiled = torch.compile(lambda x: functional.rms_fma_triton(x, x + 1, x + 2), fullgraph=True, backend=backend)
    x = torch.randn(3, 8, device=device)
    compiled(x.clone())
    set_backend("rms_fma", None)
    if device == "cpu":
        compiled(x.clone())
        assert seen == [[torch.ops.ltx_kernels.rms_fma_triton.default], [torch.ops.ltx_kernels.rms_fma.default]]
    assert seen[0] == [torch.ops.ltx_kernels.rms_fma_triton.default]


@on_triton
def test_messages_are_those_of_every_backend(device: str) -> None:
    x, ones = torch.zeros(2, 8, device=device), torch.ones(2, 8, device=device)
    fp8 = x.to(torch.float8_e4m3fn)
    for call, message in [
        (lambda: blockwise_quantize(x.int()), "quantize: x must be bfloat16, float16 or float32, got int32"),
        (lambda: functional.blockwise_quantize_weights(x, 64), "quantize_weights: block_size must be 128, got 64"),
        (lambda: functional.blockwise_dequantize((fp8, ones)), "dequantize: scales must have shape [2, 1], got [2, 8]"),
        (
            lambda: functional.blockwise_dequantize_weights(fp8, ones),
            "dequantize_weights: scales must have shape [1, 1], got [2, 8]",
        ),
        (
            lambda: functional.blockwise_quantize_adanorm_triton(x, ones[0, :7], ones, ones),
            "adanorm_quantize: w must have shape [8], got [7]",
        ),
        (
            lambda: functional.blockwise_quantize_rms_fma_triton(x, x, ones),
            "rms_fma_quantize: y must not overlap x, got one that shares memory with it",
        ),
        (
            lambda: functional.rms_fma_triton(x, ones, x),
            "rms_fma: z must not overlap x, got one that shares memory with it",
        ),
        (
            lambda: functional.gated_attention_triton(x, ones[:, :3]),
            "gated_attention: gate_logits must have a last size that divides x's, 8, got 3",
        ),
    ]:
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            call()


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="is about CPU tensors without triton's interpreter")
def test_cpu_tensors_without_the_interpreter() -> None:
    message = "quantize: triton takes cpu tensors in its interpreter (TRITON_INTERPRET=1) and only there, got cpu"
    set_backend("quantize", "triton")
    try:
        for call in (lambda: blockwise_quantize(torch.zeros(2, 8)), lambda: get_backend("quantize", "cpu")):
            with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
                call()
    finally:
        set_backend("quantize", None)
    assert get_backend("quantize", "cpu") == "cpu"


@on_triton
def test_what_is_asked_for_is_what_runs(device: str) -> None:
    assert get_backend("quantize", device) == "triton"
    ran = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2, 8, device=device)
    with Mode():
        blockwise_quantize(x)
    assert ran[0] == "ltx_kernels.quantize_triton.default"


def test_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from ltx_kernels.blockwise import blockwise_quantize, get_backend, set_backend, triton_ops
blockwise_quantize(torch.zeros(2, 8))
set_backend("quantize", "triton")
for call in (lambda: blockwise_quantize(torch.zeros(2, 8)), lambda: get_backend("quantize", "cpu")):
    try:
        call()
    except RuntimeError as error:
        assert str(error).startswith("quantize: triton cannot be imported ("), error
    else:
        raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
