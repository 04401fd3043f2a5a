"""dequantize and dequantize_weights, on every device, bit for bit."""

import re

import pytest
import torch
from behaviour import assert_captures, assert_compiles, assert_inputs_untouched, assert_no_backward, assert_repeatable
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import E4M3_MAGNITUDES, assert_bits
from torch import Tensor

from ltx_kernels._backends import serving
from ltx_kernels.blockwise import blockwise_dequantize, blockwise_quantize, functional, triton_ops
from ltx_kernels.blockwise.functional import blockwise_dequantize_weights, fp8_blockwise_quantize_weights_torch

OP = "dequantize"
FP8 = torch.float8_e4m3fn
op = torch.ops.ltx_kernels.dequantize.default
weights_op = torch.ops.ltx_kernels.dequantize_weights.default


def values_of(q: Tensor) -> Tensor:
    """fp32 values of e4m3 bytes, from the table of all magnitudes."""
    codes = q.cpu().contiguous().view(torch.uint8).long()
    magnitudes = torch.cat([E4M3_MAGNITUDES.float(), torch.tensor([torch.nan])])
    return torch.where(codes < 128, 1.0, -1.0) * magnitudes[codes % 128]


def to_bfloat16(values: Tensor) -> Tensor:
    """fp32 to bf16 by integers, ties to even, NaN 0x7FC0."""
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded = torch.where(values.isnan(), 0x7FC0, rounded)
    return torch.where(rounded >= 2**15, rounded - 2**16, rounded).to(torch.int16).view(torch.bfloat16)


def expected_rows(q: Tensor, scales: Tensor) -> Tensor:
    """scales: [rows, blocks] in any layout."""
    columns = scales.cpu().float().repeat_interleave(128, dim=1)[:, : q.shape[-1]]
    return to_bfloat16(values_of(q) * columns.reshape(q.shape))


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(FP8)


def random_scales(rows: int, blocks: int) -> Tensor:
    return torch.randn(rows, blocks) * 10.0 ** torch.randint(-40, 37, (rows, blocks))


@pytest.mark.parametrize(
    "scale",
    [1.0, -3.0, 1.0078125, 1 / 448, 2.0**-117 / 448, 2.0**-149, 3e38, 0.0, -0.0, float("inf"), float("nan")],
)
def test_every_byte(scale: float, device: str) -> None:
    q = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 128)
    scales = torch.full((2, 1), scale)
    out = blockwise_dequantize((q.to(device), scales.to(device)))
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    assert_bits(out, expected_rows(q, scales))


def test_ties_of_bf16(device: str) -> None:
    """e4m3 value 1.125 times scales with 8 mantissa bits: every second product lies in the middle of two bf16."""
    scales = 1 + torch.arange(256)[:, None] / 256
    q = torch.full((256, 1), 0x39, dtype=torch.uint8).view(FP8)
    assert_bits(blockwise_dequantize((q.to(device), scales.to(device))), expected_rows(q, scales))


def test_product_is_rounded_to_fp32_first(device: str) -> None:
    """1.125 * (1 + 2^-8 + 2^-23 * k): some products are rounded twice, to fp32 and then to bf16."""
    scales = (1 + 2.0**-8 + torch.arange(-64, 64)[:, None] * 2.0**-23) / 9 * 8
    q = torch.full((128, 1), 0x39, dtype=torch.uint8).view(FP8)
    assert_bits(blockwise_dequantize((q.to(device), scales.to(device))), expected_rows(q, scales))


@pytest.mark.parametrize("hidden", [1, 4, 64, 127, 128, 129, 192, 200, 4096, 5120])
@pytest.mark.parametrize("layout", ["column-major", "row-major", "padded", "bf16", "every second", "broadcast"])
def test_scales_of_any_strides(layout: str, hidden: int, device: str) -> None:
    rows, blocks = 6, -(-hidden // 128)
    q, scales = random_bytes(rows, hidden), random_scales(rows, blocks)
    if layout == "column-major":
        scales = scales.t().contiguous().t()
    elif layout == "padded":
        wide = torch.full((blocks, rows + 2), torch.nan)
        wide[:, :rows] = scales.t()
        scales = wide.t()[:rows]
    elif layout == "bf16":
        scales = scales.bfloat16()
    elif layout == "every second":
        scales = scales.repeat_interleave(2, dim=1)[:, ::2]
    elif layout == "broadcast":
        scales = scales[:1].expand(rows, -1)
    assert_bits(blockwise_dequantize((q.to(device), scales.to(device))), expected_rows(q, scales))


@pytest.mark.parametrize("shape", [(200,), (3, 200), (2, 3, 200), (2, 1, 3, 130), (0, 200), (2, 0, 128), (5, 0)])
def test_any_rank_and_both_shapes_of_scales(shape: tuple[int, ...], device: str) -> None:
    q = random_bytes(*shape)
    scales = random_scales(q.shape[:-1].numel(), -(-shape[-1] // 128))
    expected = expected_rows(q, scales)
    for shaped in (scales, scales.reshape(*shape[:-1], scales.shape[1])):
        out = blockwise_dequantize((q.to(device), shaped.to(device)))
        assert out.is_contiguous() and out.dtype == torch.bfloat16
        assert_bits(out, expected)


def test_scales_in_the_shape_of_q_with_swapped_axes(device: str) -> None:
    q, scales = random_bytes(2, 3, 200), random_scales(6, 2)
    swapped = scales.view(2, 3, 2).transpose(0, 1).contiguous().transpose(0, 1)
    assert_bits(blockwise_dequantize((q.to(device), swapped.to(device))), expected_rows(q, scales))


def test_q_of_any_strides(device: str) -> None:
    wide, scales = random_bytes(4, 12, 300), random_scales(24, 2)
    for q in (wide[:, :6, 40:240], wide[:, ::2, 40:240], wide[:, :6, 40:240].transpose(0, 1)):
        assert_bits(blockwise_dequantize((q.to(device), scales.to(device))), expected_rows(q, scales))


def test_of_quantized(device: str) -> None:
    x = torch.randn(2, 5, 200, device=device)
    pair = blockwise_quantize(x)
    values = blockwise_dequantize(pair)
    assert values.shape == x.shape
    assert ((values - x).abs() <= x.abs() / 16 + x.abs().amax() * 2.0**-10).all()


def test_the_call_of_ltx_core_for_weights(device: str) -> None:
    """Weights [1, out, in] with row-major scales, one for each row: those of tiles, each repeated 128 times."""
    w = torch.randn(256, 384, device=device)
    q, scales = fp8_blockwise_quantize_weights_torch(w)
    out = blockwise_dequantize((q[None], scales.repeat_interleave(128, 0)))
    assert out.shape == (1, 256, 384)
    assert_bits(out[0], blockwise_dequantize_weights(q, scales))
    q, scales = fp8_blockwise_quantize_weights_torch(w[:200])
    with pytest.raises(
        RuntimeError, match=r"^dequantize: scales must have shape \[200, 3\] or \[1, 200, 3\], got \[256, 3\]$"
    ):
        blockwise_dequantize((q[None], scales.repeat_interleave(128, 0)))


@pytest.mark.parametrize("shape", [(256, 384), (1, 1), (129, 130), (200, 64), (0, 128), (128, 0)], ids=str)
@pytest.mark.parametrize("layout", ["row-major", "column-major", "fp16"])
def test_weights(shape: tuple[int, int], layout: str, device: str) -> None:
    q = random_bytes(*shape)
    scales = torch.randn(-(-shape[0] // 128), -(-shape[1] // 128))
    if layout == "column-major":
        scales = scales.t().contiguous().t()
    elif layout == "fp16":
        scales = scales.half()
    out = blockwise_dequantize_weights(q.to(device), scales.to(device))
    assert out.is_contiguous()
    assert_bits(out, expected_rows(q, scales.repeat_interleave(128, dim=0)[: shape[0]]))


def test_weights_of_any_row_stride(device: str) -> None:
    wide, scales = random_bytes(200, 300), torch.randn(2, 2)
    q = wide[:, 40:240]
    out = blockwise_dequantize_weights(q.to(device), scales.to(device))
    assert_bits(out, expected_rows(q, scales.repeat_interleave(128, dim=0)[:200]))


@settings(deadline=None, max_examples=60)
@given(
    leading=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    hidden=st.integers(1, 400),
    gap=st.integers(0, 20),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_stride(leading: list[int], hidden: int, gap: int, seed: int) -> None:
    torch.manual_seed(seed)
    q = random_bytes(*leading, hidden + gap)[..., gap:]
    scales = random_scales(q.shape[:-1].numel(), -(-hidden // 128))
    assert_bits(blockwise_dequantize((q, scales)), expected_rows(q, scales))


def test_opcheck(device: str) -> None:
    """Without test_schema, which cannot compare fp8 on a CPU; test_behaviour compares the inputs' bytes."""
    utilities = ("test_faketensor", "test_aot_dispatch_dynamic")
    for shape in [(2, 5, 200), (3, 128), (0, 130)]:
        x = torch.randn(shape, device=device)
        torch.library.opcheck(serving(op, torch.device(device)), blockwise_quantize(x), test_utils=utilities)
    pair = fp8_blockwise_quantize_weights_torch(torch.randn(200, 130, device=device))
    torch.library.opcheck(serving(weights_op, torch.device(device)), pair, test_utils=utilities)


def test_behaviour_and_graphs(device: str) -> None:
    pair = blockwise_quantize(torch.randn(2, 5, 200, device=device))
    weights_pair = fp8_blockwise_quantize_weights_torch(torch.randn(200, 130, device=device))
    for function, inputs, name in [
        (triton_ops.blockwise_dequantize_triton, list(pair), "dequantize"),
        (blockwise_dequantize_weights, list(weights_pair), "dequantize_weights"),
    ]:
        assert_inputs_untouched(function, inputs)
        assert_repeatable(function, inputs)
        assert_no_backward(function, inputs, name)
        assert_compiles(function, inputs)
        if device == "cuda":
            assert_captures(function, inputs, inputs)
    assert_compiles(
        functional.blockwise_dequantize_triton,
        *([random_bytes(m, h).to(device), random_scales(m, -(-h // 128)).to(device)] for m, h in [(5, 200), (9, 300)]),
    )
    assert_bits(triton_ops.blockwise_dequantize_triton(*pair), blockwise_dequantize(pair))


@pytest.mark.parametrize(
    ("q", "scales", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 1), "q must be float8_e4m3fn, got float32"),
        (torch.zeros(2, 2).to(torch.float8_e5m2), torch.zeros(2, 1), "q must be float8_e4m3fn, got float8_e5m2"),
        (random_bytes(2, 2), torch.zeros(2, 1).int(), "scales must be bfloat16, float16 or float32, got int32"),
        (random_bytes(2, 130), torch.zeros(2, 1), "scales must have shape [2, 2], got [2, 1]"),
        (random_bytes(2, 130), torch.zeros(2, 2, 1), "scales must have shape [2, 2], got [2, 2, 1]"),
        (random_bytes(2, 130), torch.zeros(()), "scales must have shape [2, 2], got []"),
        (random_bytes(2, 3, 4), torch.zeros(3, 2, 1), "scales must have shape [6, 1] or [2, 3, 1], got [3, 2, 1]"),
        (random_bytes(4, 4).t(), torch.zeros(4, 1), "q must have a contiguous last dimension, got stride 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(q: Tensor, scales: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'dequantize: {message}')}$"):
        op(q, scales)


@pytest.mark.parametrize(
    ("q", "scales", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(1, 1), "q must be float8_e4m3fn, got float32"),
        (random_bytes(2, 2), torch.zeros(1, 1).double(), "scales must be bfloat16, float16 or float32, got float64"),
        (random_bytes(1, 2, 2), torch.zeros(1, 1), "q must have 2 dimensions, got [1, 2, 2]"),
        (random_bytes(130, 2), torch.zeros(130, 1), "scales must have shape [2, 1], got [130, 1]"),
        (random_bytes(4, 4).t(), torch.zeros(1, 1), "q must have a contiguous last dimension, got stride 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_of_weights(q: Tensor, scales: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'dequantize_weights: {message}')}$"):
        blockwise_dequantize_weights(q, scales)
