"""quantize, on every device: bit for bit by comparison with all e4m3 values; its GELU forms against float64."""

import itertools
import re
from typing import Any

import pytest
import torch
from behaviour import (
    assert_captures,
    assert_compiles,
    assert_inputs_untouched,
    assert_no_backward,
    assert_repeatable,
    assert_uses_current_stream,
    assert_uses_own_device,
)
from cases.quantize import BF16, CASES, EXTREMES, FP32, Case, extreme_block
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import E4M3_MAGNITUDES, assert_bits, assert_pair, assert_quantized, quantize_rows
from torch import Tensor

from ltx_kernels._backends import serving
from ltx_kernels.blockwise import blockwise_dequantize, blockwise_quantize, functional, triton_ops

OP = "quantize"
op = torch.ops.ltx_kernels.quantize.default
GELU_FORMS = ("tanh", "sigmoid")


def assert_quantizes(x: Tensor) -> None:
    pair = blockwise_quantize(x)
    assert_pair(pair, x.shape)
    q, scales = quantize_rows(x)
    assert_bits(pair[0].view(torch.uint8), q)
    assert_bits(pair[1], scales)


def exact_gelu(x: Tensor, gelu: str) -> Tensor:
    x = x.cpu().double()
    if gelu == "sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return torch.where(x.isfinite(), torch.nn.functional.gelu(x, approximate="tanh"), torch.nan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_for_bit(case: Case, device: str) -> None:
    assert_quantizes(case.make_x(device))


def test_by_hand(device: str) -> None:
    x = torch.zeros(1, 256, device=device)
    x[0, :4] = torch.tensor([0.5, -1.0, 1 / 448, -0.0])
    q, scales = blockwise_quantize(x)
    assert q.view(torch.uint8)[0, :5].tolist() == [0x76, 0xFE, 0x38, 0x80, 0x00]  # 224, -448, 1, -0, 0
    assert scales.tolist() == [
        [(torch.tensor(1.0) / torch.tensor(448.0)).item(), (2.0**-117 / torch.tensor(448.0)).item()]
    ]


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_blocks_and_their_neighbours(name: str, device: str) -> None:
    x = torch.randn(4, 384)
    x[1, 128:256] = extreme_block(name)
    assert_quantizes(x.to(device))
    clean = torch.where(torch.arange(384) // 128 == 1, 0.0, x)
    (q, scales), (clean_q, clean_scales) = blockwise_quantize(x.to(device)), blockwise_quantize(clean.to(device))
    for block in (0, 2):
        columns = slice(128 * block, 128 * (block + 1))
        assert_bits(q[:, columns], clean_q[:, columns])
        assert_bits(scales[:, block], clean_scales[:, block])
    values, block = blockwise_dequantize((q, scales)).cpu()[1, 128:256], x[1, 128:256].double()
    if not block.isfinite().all():
        assert values.isnan().all()
        return
    if name == "zeros":
        assert_bits(values, torch.zeros(128, dtype=BF16))
    exact = q.cpu()[1, 128:256].double() * scales.cpu()[1, 1].double()
    half_step = max(block.abs().max().item(), 2.0**-117) / 448 * 16  # the largest e4m3 values are 32 apart
    assert ((exact - block).abs() <= half_step * (1 + 2.0**-20)).all()


def test_every_tie_and_its_neighbours(device: str) -> None:
    """448 in each block makes the scale 1, so that all other values are what is rounded."""
    middles = ((E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2).float()
    values = torch.cat([middles, torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, middles * 2)])
    values = torch.cat([values, -values])
    x = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    x = torch.cat([torch.full((len(x), 1), 448.0), x], dim=1)
    assert_quantizes(x.to(device))
    q, scales = blockwise_quantize(x.to(device))
    assert (scales == 1).all()
    assert q.view(torch.uint8)[0, 1:127].tolist() == [c + c % 2 for c in range(126)]  # the middles: to the even byte


def test_every_significand_of_the_largest(device: str) -> None:
    """The rest of a block lies at ties and beside them, where a multiplier of another last bit gives another q."""
    middles = ((E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2).float().to(device)
    step = 1 if device == "cuda" else 8209
    for significands in torch.arange(0, 2**23, step, dtype=torch.int32, device=device).split(2**18):
        exponents = 10 + significands % 245  # of 2^-117 to 2^127
        amax = (exponents << 23 | significands).view(torch.float32)[:, None]
        largest = torch.full_like(amax, 448)
        ties = middles / (largest / amax)  # tensors divide tensors: that is IEEE
        beside = (ties.view(torch.int32) + significands[:, None] % 3 - 1).view(torch.float32)
        x = torch.cat([amax, beside], dim=1)
        q, scales = blockwise_quantize(x)
        assert_bits(scales, amax / largest)
        assert_bits(q, (x * (largest / amax)).to(q.dtype))


def test_every_byte_comes_back(device: str) -> None:
    finite = torch.tensor([c for c in range(256) if c % 128 != 127], dtype=torch.uint8)
    x = finite.view(2, 127)
    x = torch.cat([torch.full((2, 1), 0x7E, dtype=torch.uint8), x], dim=1).to(device).view(torch.float8_e4m3fn)
    q, scales = blockwise_quantize(x.float())
    assert_bits(q, x)
    assert (scales == 1).all()


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (0, 200), (5, 0), (0,), (1,), (200,), (2, 1, 3, 1, 2, 130)])
@pytest.mark.parametrize("gelu", [None, *GELU_FORMS])
def test_any_rank_and_empty(shape: tuple[int, ...], gelu: str | None, device: str) -> None:
    x = torch.randn(shape, device=device)
    assert_pair(blockwise_quantize(x, gelu=gelu), x.shape)
    assert_quantizes(x)


def test_rows_past_the_last_are_not_read(device: str) -> None:
    wide = torch.full((9, 200), torch.nan, device=device)
    wide[:5] = torch.randn(5, 200)
    assert_quantizes(wide[:5])
    assert blockwise_quantize(wide[:5])[1].isfinite().all()


def test_offsets_past_2_31_elements(device: str) -> None:
    rows, stride = 65_536, 34_816
    wide = torch.zeros(rows, stride, dtype=BF16, device=device)
    wide[-1] = torch.randn(stride)
    x = wide[:, -130:]
    q, scales = blockwise_quantize(x)
    expected_q, expected_scales = quantize_rows(x[-3:])
    assert_bits(q[-3:].view(torch.uint8), expected_q)
    assert_bits(scales[-3:], expected_scales)
    assert not q[:-1].view(torch.uint8).any()


def test_more_than_2_31_elements(device: str) -> None:
    if device == "cpu":
        pytest.skip("7 GB and minutes on a CPU")
    x = torch.randn(600_000, 4096, dtype=BF16, device=device)
    q, scales = blockwise_quantize(x)
    sample = torch.tensor([0, 524_287, 524_288, 599_999], device=device)  # 2^31 elements end with row 524,287
    expected_q, expected_scales = quantize_rows(x[sample])
    assert_bits(q.view(torch.uint8)[sample], expected_q)
    assert_bits(scales[sample], expected_scales)


@pytest.mark.parametrize("gelu", GELU_FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gelu(case: Case, gelu: str, device: str) -> None:
    x = case.make_x(device)
    assert_quantized(blockwise_quantize(x, gelu=gelu), exact_gelu(x, gelu), x.abs())


@pytest.mark.parametrize("gelu", GELU_FORMS)
def test_gelu_over_its_whole_range(gelu: str, device: str) -> None:
    for low, high in itertools.pairwise([-150.0, -20.0, -10.0, -5.0, -2.0, -0.5, 0.0, 0.5, 2.0, 5.0, 20.0, 1e3]):
        x = torch.linspace(low, high, 128 * 8, device=device).view(8, 128)
        assert_quantized(blockwise_quantize(x, gelu=gelu), exact_gelu(x, gelu), x.abs())


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("gelu", GELU_FORMS)
def test_gelu_of_extreme_blocks(name: str, gelu: str, device: str) -> None:
    x = torch.randn(3, 300)
    x[1, 128:256] = extreme_block(name)
    assert_quantized(blockwise_quantize(x.to(device), gelu=gelu), exact_gelu(x, gelu), x.abs())


@settings(deadline=None, max_examples=100)
@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    hidden=st.integers(1, 400),
    gap=st.integers(0, 40),
    exponent=st.integers(-44, 38),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_stride_and_value(
    leading: list[int], hidden: int, gap: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*leading, hidden + gap, generator=generator) * 10.0**exponent
    assert_quantizes(wide.to(dtype)[..., gap // 2 : gap // 2 + hidden])


@settings(deadline=None, max_examples=50)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_any_bits(bits: list[int]) -> None:
    x = torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)
    assert_quantizes(x)


@pytest.mark.parametrize("gelu", [None, 1, 2])
def test_opcheck(gelu: int | None, device: str) -> None:
    for shape in [(3, 200), (2, 4, 128), (0, 130)]:
        torch.library.opcheck(serving(op, torch.device(device)), (torch.randn(shape, device=device), gelu))


def test_compiles(device: str) -> None:
    sets = [[torch.randn(shape, device=device)] for shape in [(2, 5, 256), (3, 7, 200), (1, 4, 130)]]
    for gelu in (None, "tanh"):
        assert_compiles(lambda x, gelu=gelu: blockwise_quantize(x, gelu=gelu), *sets)
    transposed = torch.randn(5, 2, 256, device=device).transpose(0, 1)
    assert_compiles(lambda x: blockwise_quantize(x, gelu="sigmoid"), [transposed])


def test_behaviour_and_graphs(device: str) -> None:
    inputs = [torch.randn(33, 200, device=device)]
    assert_inputs_untouched(blockwise_quantize, inputs)
    assert_repeatable(lambda x: blockwise_quantize(x, gelu="tanh"), inputs)
    assert_no_backward(blockwise_quantize, inputs, OP)
    if device == "cuda":
        assert_captures(blockwise_quantize, inputs, [torch.randn(33, 200, device=device)])
        assert_uses_current_stream(blockwise_quantize, inputs)
        if torch.cuda.device_count() > 1:
            assert_uses_own_device(blockwise_quantize, inputs)


def test_names_that_callers_know() -> None:
    x = torch.randn(3, 200)
    for module in (functional, triton_ops):
        assert_bits(module.blockwise_quantize_triton(x)[0], blockwise_quantize(x)[0])
        assert_bits(module.blockwise_quantize_gelu_triton(x)[0], blockwise_quantize(x, gelu="sigmoid")[0])
    assert (functional.FP8_SCALE_MAX, functional.FP6_SCALE_MAX) == (448.0, 0.1172)


@pytest.mark.parametrize(
    ("x", "gelu", "message"),
    [
        (torch.zeros(2, 2).int(), None, "x must be bfloat16, float16 or float32, got int32"),
        (torch.zeros(2, 2).double(), None, "x must be bfloat16, float16 or float32, got float64"),
        (torch.zeros(()), None, "x must have 1 to 8 dimensions, got []"),
        (torch.zeros([1] * 9), None, "x must have 1 to 8 dimensions, got 9 dimensions"),
        (torch.zeros([1] * 64), None, "x must have 1 to 8 dimensions, got 64 dimensions"),
        (torch.zeros(4, 4).t(), None, "x must have a contiguous last dimension, got stride 4"),
        (torch.zeros(2, 4)[:, ::2], None, "x must have a contiguous last dimension, got stride 2"),
        (torch.zeros(2, 2), "relu", "gelu must be None, 'tanh' or 'sigmoid', got 'relu'"),
        (torch.zeros(2, 2), ["tanh"], "gelu must be None, 'tanh' or 'sigmoid', got ['tanh']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(x: Tensor, gelu: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'quantize: {message}')}$"):
        blockwise_quantize(x, gelu=gelu)


def test_message_of_the_op() -> None:
    with pytest.raises(RuntimeError, match=r"^quantize: gelu must be None, 1 \(tanh\) or 2 \(sigmoid\), got 3$"):
        op(torch.zeros(2, 2, dtype=FP32), 3)
