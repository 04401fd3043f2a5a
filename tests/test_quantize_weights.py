"""quantize_weights, on every device, bit for bit by comparison with all e4m3 values."""

import re

import pytest
import torch
from behaviour import assert_captures, assert_compiles, assert_inputs_untouched, assert_no_backward, assert_repeatable
from cases.quantize import BF16, EXTREMES, FP32, extreme_block
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_bits, quantize_block
from torch import Tensor

from ltx_kernels._backends import serving
from ltx_kernels.blockwise import fp6_blockwise_quantize_weights_torch, fp8_blockwise_quantize_weights_torch
from ltx_kernels.blockwise.functional import (
    FP6_SCALE_MAX,
    FP8_SCALE_MAX,
    blockwise_dequantize_weights,
    blockwise_quantize_weights,
)

OP = "quantize_weights"
op = torch.ops.ltx_kernels.quantize_weights.default
RANGES = [FP8_SCALE_MAX, FP6_SCALE_MAX]


def quantize_tiles(w: Tensor, scale_max: float) -> tuple[Tensor, Tensor]:
    q = torch.empty(w.shape, dtype=torch.uint8)
    scales = torch.empty(-(-w.shape[0] // 128), -(-w.shape[1] // 128))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            rows, columns = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
            tile = w[rows, columns]
            tile_q, scales[row, column] = quantize_block(tile.reshape(-1), scale_max)
            q[rows, columns] = tile_q.view(tile.shape)
    return q, scales


def assert_quantizes(w: Tensor, scale_max: float) -> None:
    q, scales = blockwise_quantize_weights(w, 128, scale_max)
    assert q.dtype == torch.float8_e4m3fn and q.is_contiguous()
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    expected_q, expected_scales = quantize_tiles(w, scale_max)
    assert_bits(q.view(torch.uint8), expected_q)
    assert_bits(scales, expected_scales)


@pytest.mark.parametrize("scale_max", RANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (256, 384),
        (128, 128),
        (1, 1),
        (8, 16),
        (129, 127),
        (200, 130),
        (80, 192),
        (1000, 40),
        (0, 128),
        (128, 0),
        (0, 0),
    ],
    ids=str,
)
def test_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype, scale_max: float, device: str) -> None:
    assert_quantizes((torch.randn(shape) / 50).to(dtype).to(device), scale_max)


@pytest.mark.parametrize("scale_max", RANGES)
def test_strides(scale_max: float, device: str) -> None:
    wide = torch.full((300, 700), torch.nan, device=device, dtype=BF16)
    wide[:200, 129:459] = torch.randn(200, 330)
    assert_quantizes(wide[:200, 129:459], scale_max)
    assert_quantizes(wide[:200:3, 129:459], scale_max)
    assert_quantizes(torch.randn(1, 200, device=device).expand(130, -1), scale_max)


@pytest.mark.parametrize("scale_max", RANGES)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_tiles_and_their_neighbours(name: str, scale_max: float, device: str) -> None:
    w = torch.randn(256, 384)
    w[128:, 128:256] = extreme_block(name).view(1, 128)
    assert_quantizes(w.to(device), scale_max)
    q, scales = blockwise_quantize_weights(w.to(device), 128, scale_max)
    values = blockwise_dequantize_weights(q, scales).cpu()
    tile = w[128:, 128:256]
    if not tile.isfinite().all():
        assert values[128:, 128:256].isnan().all()
    if name == "zeros":
        assert_bits(values[128:, 128:256], torch.zeros(128, 128, dtype=BF16))
    others = torch.ones(256, 384, dtype=torch.bool)
    others[128:, 128:256] = False
    assert ((values - w)[others].abs() < 0.4).all()


def test_every_tie(device: str) -> None:
    """448 in the tile makes the scale 1: all other values, sums of two bytes' values over 2, are what is rounded."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    w = torch.cat([torch.tensor([448.0]), middles, -middles])[None]
    w = torch.cat([w[:, :128], torch.cat([torch.tensor([[448.0]]), w[:, 128:]], 1)], 1)
    assert_quantizes(w.to(device), 448.0)


def test_the_6_bit_range_fits_6_bits(device: str) -> None:
    """No byte has one of the two upper exponent bits, and the largest value of a tile becomes the largest there is."""
    for seed in range(20):
        w = torch.randn(128, 130, generator=torch.Generator().manual_seed(seed)).to(device)
        q, _ = fp6_blockwise_quantize_weights_torch(w)
        codes = q.view(torch.uint8).cpu() % 128
        assert codes.max() == 0x1F
        assert codes[:, :128].flatten()[w[:, :128].abs().argmax().cpu()] == 0x1F


def test_overflow_of_the_scale_of_6_bits(device: str) -> None:
    q, scales = fp6_blockwise_quantize_weights_torch(torch.tensor([[3e38, -1.5e38]], device=device))
    assert q.float().tolist() == [[0.1171875, -0.05859375]]
    assert scales.tolist() == [[torch.inf]]


def test_named_forms(device: str) -> None:
    w = torch.randn(200, 130, device=device)
    for function, scale_max in [
        (fp8_blockwise_quantize_weights_torch, 448.0),
        (fp6_blockwise_quantize_weights_torch, 0.1172),
    ]:
        for pair in (function(w), function(w, 128), function(w, block_size=128)):
            for actual, expected in zip(pair, blockwise_quantize_weights(w, scale_max=scale_max), strict=True):
                assert_bits(actual, expected)
    assert_bits(blockwise_quantize_weights(w)[0], fp8_blockwise_quantize_weights_torch(w)[0])


@settings(deadline=None, max_examples=60)
@given(
    out=st.integers(0, 300),
    size=st.integers(0, 300),
    gap=st.integers(0, 20),
    exponent=st.integers(-44, 37),
    scale_max=st.sampled_from([448.0, 0.1172, 1.0, 7.5]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_stride_and_value(out: int, size: int, gap: int, exponent: int, scale_max: float, seed: int) -> None:
    wide = torch.randn(out, size + gap, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    assert_quantizes(wide[:, gap:], scale_max)


def test_opcheck(device: str) -> None:
    for shape in [(200, 130), (3, 1), (0, 5)]:
        torch.library.opcheck(serving(op, torch.device(device)), (torch.randn(shape, device=device), 128, 448.0))


def test_behaviour_and_graphs(device: str) -> None:
    inputs = [torch.randn(200, 130, device=device)]
    assert_inputs_untouched(blockwise_quantize_weights, inputs)
    assert_repeatable(blockwise_quantize_weights, inputs)
    assert_no_backward(blockwise_quantize_weights, inputs, OP)
    assert_compiles(blockwise_quantize_weights, inputs, [torch.randn(300, 260, device=device)])
    if device == "cuda":
        assert_captures(blockwise_quantize_weights, inputs, [torch.randn(200, 130, device=device)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([torch.zeros(2, 2).int()], "w must be bfloat16, float16 or float32, got int32"),
        ([torch.zeros(2, 2).to(torch.float8_e4m3fn)], "w must be bfloat16, float16 or float32, got float8_e4m3fn"),
        ([torch.zeros(1, 2, 2)], "w must have 2 dimensions, got [1, 2, 2]"),
        ([torch.zeros(4, 3).t()], "w must have a contiguous last dimension, got stride 3"),
        ([torch.zeros(2, 2, dtype=FP32), 64], "block_size must be 128, got 64"),
        ([torch.zeros(2, 2), 128, 0.0], "scale_max must be > 0 and at most 448, got 0"),
        ([torch.zeros(2, 2), 128, float("nan")], "scale_max must be > 0 and at most 448, got nan"),
        ([torch.zeros(2, 2), 128, 500.0], "scale_max must be > 0 and at most 448, got 500"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(arguments: list[object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'quantize_weights: {message}')}$"):
        blockwise_quantize_weights(*arguments)
