"""adanorm_quantize, on every device, against float64."""

import re

import pytest
import torch
from behaviour import (
    assert_captures,
    assert_compiles,
    assert_inputs_untouched,
    assert_no_backward,
    assert_repeatable,
    assert_uses_current_stream,
)
from cases.quantize import EXTREMES, FP32, MODULATED_CASES, UNBOUND_CASES, Case, extreme_block
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_bits, assert_quantized, quantize_rows
from torch import Tensor

from ltx_kernels._backends import serving
from ltx_kernels.blockwise import blockwise_quantize_adanorm_triton

OP = "adanorm_quantize"
op = torch.ops.ltx_kernels.adanorm_quantize.default


def exact(x: Tensor, w: Tensor | None, norm_scale: Tensor, norm_shift: Tensor) -> tuple[Tensor, Tensor]:
    """The modulated norm and the larger addend of its last sum, in float64 on the CPU."""
    x, norm_scale, norm_shift = (t.detach().cpu().double() for t in (x, norm_scale, norm_shift))
    squares = x.square().sum(-1, keepdim=True)
    v = x / torch.sqrt(squares / x.shape[-1] + 1e-5)
    v = torch.where(squares.float().isfinite(), v, torch.nan)
    if w is not None:
        v = v * w.cpu().double()
    v = v * (1 + norm_scale)
    return v + norm_shift, torch.maximum(v.abs(), norm_shift.abs())


def assert_adanorm(x: Tensor, w: Tensor | None, norm_scale: Tensor, norm_shift: Tensor) -> None:
    pair = blockwise_quantize_adanorm_triton(x, w, norm_scale, norm_shift)
    assert_quantized(pair, *exact(x, w, norm_scale, norm_shift))


@pytest.mark.parametrize("weights", ["none", "bf16", "fp32"])
@pytest.mark.parametrize("case", [*MODULATED_CASES, *UNBOUND_CASES], ids=str)
def test_against_float64(case: Case, weights: str, device: str) -> None:
    w = None if weights == "none" else (1 + torch.randn(case.hidden) / 4).to(device)
    w = w.bfloat16() if weights == "bf16" else w
    assert_adanorm(case.make_x(device), w, case.make_modulation(device), case.make_modulation(device))


def test_by_hand(device: str) -> None:
    x = torch.tensor([[[100.0, -100.0], [0.0, 0.0]]], device=device)  # rstd is 1/100 up to 5e-10
    w, scale, shift = (torch.tensor(t, device=device) for t in ([2.0, 4.0], [[[1.0, -1.0]]], [[[-12.0, 4.0]]]))
    q, scales = blockwise_quantize_adanorm_triton(x, w, scale, shift)
    assert q.float().tolist() == [[[-448.0, 224.0], [-448.0, 144.0]]]  # -8, 4; -12, 4
    assert torch.allclose(scales.cpu() * 448, torch.tensor([[8.0], [12.0]]))


def test_the_call_of_ltx_core(device: str) -> None:
    x = torch.randn(2, 6, 512, device=device).bfloat16()
    shift, scale, _ = torch.randn(2, 1, 3, 512, device=device).bfloat16().unbind(dim=2)
    pair = blockwise_quantize_adanorm_triton(x, None, scale, shift, torch.float8_e4m3fn, 1.0)
    assert_quantized(pair, *exact(x, None, scale, shift))


@pytest.mark.parametrize(
    ("scale_shape", "shift_shape"),
    [((256,), (2, 1, 256)), ((1, 5, 256), (1, 1, 256)), ((5, 256), (2, 5, 256)), ((1, 256), (1, 256))],
)
def test_broadcast(scale_shape: tuple[int, ...], shift_shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(2, 5, 256, device=device)
    assert_adanorm(x, None, torch.randn(scale_shape, device=device), torch.randn(shift_shape, device=device))


@pytest.mark.parametrize("shape", [(256,), (7, 200), (2, 3, 2, 130), (0, 64), (5, 0)])
def test_any_rank(shape: tuple[int, ...], device: str) -> None:
    x, scale, shift = (torch.randn(shape, device=device) for _ in range(3))
    assert_adanorm(x, None, scale, shift)


def test_a_zero_row_is_the_shift(device: str) -> None:
    x = torch.zeros(2, 3, 200, device=device)
    scale, shift = torch.randn(2, 2, 1, 200, device=device)
    q, scales = blockwise_quantize_adanorm_triton(x, None, scale, shift)
    expected_q, expected_scales = quantize_rows(shift.expand(2, 3, 200))
    assert_bits(q.view(torch.uint8), expected_q)
    assert_bits(scales, expected_scales)


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("where", ["x", "w", "norm_scale", "norm_shift"])
def test_extreme_values(name: str, where: str, device: str) -> None:
    tensors = {key: torch.randn(2, 3, 384) for key in ("x", "norm_scale", "norm_shift")} | {"w": torch.randn(384)}
    tensors["norm_scale"].abs_()  # no product overflows that the last one would bring back
    if where == "w":
        tensors["w"][128:256] = extreme_block(name)
    else:
        tensors[where][1, 1, 128:256] = extreme_block(name)
    tensors = {key: value.to(device) for key, value in tensors.items()}
    with_w = blockwise_quantize_adanorm_triton(**tensors)
    exact_v, magnitude = exact(tensors["x"], tensors["w"], tensors["norm_scale"], tensors["norm_shift"])
    overflows = exact_v.float().isinf()  # fp32 arithmetic ends where float64 goes on
    assert_quantized(with_w, torch.where(overflows, torch.nan, exact_v), magnitude)


def test_rows_that_overflow_are_poisoned_and_no_other(device: str) -> None:
    x = torch.ones(4, 300)
    x[1] = 1e19
    x[2, 17] = 1e30
    zeros = torch.zeros(300, device=device)
    q, scales = blockwise_quantize_adanorm_triton(x.to(device), None, zeros, zeros)
    assert scales.isnan().all(-1).tolist() == [False, True, True, False]
    assert not q[1:3].view(torch.uint8).any()
    assert scales[::3].isfinite().all()


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(0, 3),
    tokens=st.integers(0, 4),
    hidden=st.integers(1, 300),
    per_token=st.booleans(),
    gap=st.integers(0, 20),
    exponent=st.integers(-10, 10),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_stride_and_value(
    batch: int, tokens: int, hidden: int, per_token: bool, gap: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(batch, tokens, hidden + gap) * 2.0**exponent).to(dtype)[..., gap:]
    scale, shift = torch.randn(batch, tokens if per_token else 1, 2, hidden + gap)[..., gap:].unbind(2)
    assert_adanorm(x, torch.randn(hidden) if seed % 2 else None, scale, shift)


def test_opcheck(device: str) -> None:
    for hidden in (200, 128):
        x, scale, shift = torch.randn(2, 3, hidden), torch.randn(2, 1, hidden), torch.randn(2, 3, hidden)
        for w in (None, torch.randn(hidden)):
            torch.library.opcheck(
                serving(op, torch.device(device)), [None if t is None else t.to(device) for t in (x, w, scale, shift)]
            )


def test_behaviour_and_graphs(device: str) -> None:
    def inputs(batch: int, tokens: int, hidden: int) -> list[Tensor]:
        shapes = [(batch, tokens, hidden), (hidden,), (batch, 1, hidden), (batch, tokens, hidden)]
        return [torch.randn(shape, device=device) for shape in shapes]

    function = blockwise_quantize_adanorm_triton
    assert_inputs_untouched(function, inputs(2, 5, 200))
    assert_repeatable(function, inputs(2, 33, 200))
    assert_no_backward(function, inputs(2, 5, 200), OP)
    assert_compiles(function, inputs(2, 5, 256), inputs(3, 7, 200))
    if device == "cuda":
        assert_captures(function, inputs(2, 5, 200), inputs(2, 5, 200))
        assert_uses_current_stream(function, inputs(2, 5, 200))


GOOD = {
    "x": torch.zeros(2, 5, 8),
    "w": torch.zeros(8),
    "norm_scale": torch.zeros(2, 1, 8),
    "norm_shift": torch.zeros(8),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 5, 8).int()}, "x must be bfloat16, float16 or float32, got int32"),
        ({"x": torch.zeros(())}, "x must have 1 to 8 dimensions, got []"),
        ({"x": torch.zeros(2, 8, 5).mT}, "x must have a contiguous last dimension, got stride 5"),
        ({"w": torch.zeros(7)}, "w must have shape [8], got [7]"),
        ({"w": torch.zeros(8).double()}, "w must be bfloat16, float16 or float32, got float64"),
        (
            {"norm_scale": torch.zeros(3, 1, 8)},
            "norm_scale must broadcast to [2, 5, 8] with a last size of 8, got [3, 1, 8]",
        ),
        (
            {"norm_scale": torch.zeros(2, 1, 1)},
            "norm_scale must broadcast to [2, 5, 8] with a last size of 8, got [2, 1, 1]",
        ),
        (
            {"norm_shift": torch.zeros(2, 4, 8)},
            "norm_shift must broadcast to [2, 5, 8] with a last size of 8, got [2, 4, 8]",
        ),
        ({"norm_shift": torch.zeros(8).int()}, "norm_shift must be bfloat16, float16 or float32, got int32"),
        ({"norm_shift": torch.zeros(16)[::2]}, "norm_shift must have a contiguous last dimension, got stride 2"),
        ({"out_dtype": torch.bfloat16}, "out_dtype must be torch.float8_e4m3fn, got torch.bfloat16"),
        ({"hd_scale": 2.0}, "hd_scale must be None or 1.0, got 2.0"),
        ({"hd_scale": torch.ones(2)}, "hd_scale must be None or 1.0, got tensor([1., 1.])"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'adanorm_quantize: {message}')}$"):
        blockwise_quantize_adanorm_triton(**(GOOD | change))


def test_dtypes_of_its_own(device: str) -> None:
    x, scale, shift = torch.randn(3, 4, 256, device=device, dtype=FP32)
    assert_adanorm(x.half(), torch.randn(256, device=device).bfloat16(), scale, shift.half())
