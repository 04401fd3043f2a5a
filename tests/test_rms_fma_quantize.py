"""rms_fma_quantize and rms_fma, on every device: x bit for bit, their results against float64 of the new x."""

import math
import re
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from behaviour import assert_captures, assert_compiles, assert_repeatable, clone
from cases.quantize import EXTREMES, MODULATED_CASES, UNBOUND_CASES, Case, extreme_block
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_bits, assert_quantized, assert_rounded_once
from torch import Tensor

from ltx_kernels._backends import serving
from ltx_kernels.blockwise import blockwise_dequantize, blockwise_quantize_rms_fma_triton
from ltx_kernels.blockwise.functional import rms_fma_triton

OP = "rms_fma_quantize"
op = torch.ops.ltx_kernels.rms_fma_quantize.default
bf16_op = torch.ops.ltx_kernels.rms_fma.default
BOTH: list[Callable[[Tensor, Tensor, Tensor], object]] = [blockwise_quantize_rms_fma_triton, rms_fma_triton]


def fma(y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    """round(y * z + x) to fp32, once, then to x's dtype: the float64 sum is made odd where it is not exact.

    A product of two fp32 is exact in float64. The sum may not be; with its error put into its last bit (round to odd,
    Boldo and Melquiond, 2008) the rounding to fp32 is that of the exact sum.
    """
    product, addend = y.double() * z.double(), x.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = error.isfinite() & (error != 0) & (bits % 2 == 0)
    away = (error > 0) == (total > 0)
    return torch.where(inexact, torch.where(away, bits + 1, bits - 1), bits).view(torch.float64).float().to(x.dtype)


def exact(x: Tensor) -> Tensor:
    """The norm of the new x, in float64."""
    x = x.cpu().double()
    squares = x.square().sum(-1, keepdim=True)
    return torch.where(squares.float().isfinite(), x / torch.sqrt(squares / x.shape[-1] + 1e-6), torch.nan)


def assert_fma(x: Tensor, y: Tensor, z: Tensor) -> None:
    """Both ops, on copies of x with x's strides."""
    expected_x = fma(y.cpu(), z.cpu(), x.cpu())
    expected = exact(expected_x)
    for function in BOTH:
        new_x = clone([x])[0]
        y_before, z_before = y.clone(), z.clone()
        result = function(new_x, y, z)
        assert torch.equal(new_x.isnan().cpu(), expected_x.isnan())
        assert_bits(new_x.nan_to_num(nan=7.0), expected_x.nan_to_num(nan=7.0))
        assert_bits(y, y_before)
        assert_bits(z, z_before)
        if function is rms_fma_triton:
            assert result.dtype == torch.bfloat16 and result.is_contiguous()
            assert_rounded_once(result, expected, expected.abs())
        else:
            assert_quantized(result, expected, expected.abs())


@pytest.mark.parametrize("case", [*MODULATED_CASES, *UNBOUND_CASES], ids=str)
def test_against_float64(case: Case, device: str) -> None:
    assert_fma(case.make_x(device), case.make_other(device), case.make_modulation(device))


def test_by_hand(device: str) -> None:
    x = torch.tensor([[[1.0, 2.0]], [[5.0, 5.0]]], device=device)
    y = torch.tensor([[[2.0, 2.0]], [[1.0, 1.0]]], device=device)
    z = torch.tensor([1.0, -0.5], device=device)
    q, scales = blockwise_quantize_rms_fma_triton(x, y, z)
    assert x.tolist() == [[[3.0, 1.0]], [[6.0, 4.5]]]
    assert q.float().tolist() == [[[448.0, 144.0]], [[448.0, 320.0]]]  # 149.3 and 336 of 448
    assert torch.allclose(scales.cpu() * 448, torch.tensor([[3 / math.sqrt(5)], [6 / math.sqrt(28.125)]]))


def test_one_rounding_to_fp32(device: str) -> None:
    """(1 + 2^-12)^2 - 1 is 2^-11 + 2^-24: a product rounded by itself loses the last term."""
    x = torch.tensor([-1.0], device=device)
    y = torch.tensor([1 + 2.0**-12], device=device)
    rms_fma_triton(x, y, y)
    assert x.item() == 2.0**-11 + 2.0**-24


def test_the_norm_reads_the_rounded_x(device: str) -> None:
    """256 + 1 is a tie in bf16 and becomes 256; of 257 the norm would not be 1, 1."""
    x = torch.tensor([256.0, 256.0], device=device, dtype=torch.bfloat16)
    y, ones = torch.tensor([1.0, 0.0], device=device), torch.ones(2, device=device)
    q, _ = blockwise_quantize_rms_fma_triton(x, y, ones)
    assert x.tolist() == [256.0, 256.0]
    assert q.float().tolist() == [448.0, 448.0]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3))
def test_the_reference_fma_is_exact(values: list[float]) -> None:
    y, z, x = values
    result = fma(*(torch.tensor([v]) for v in values)).item()
    total = Fraction(y) * Fraction(z) + Fraction(x)
    if not math.isfinite(result):
        assert abs(total) >= Fraction(2) ** 128 - Fraction(2) ** 103
        return
    towards = [torch.nextafter(torch.tensor(result), torch.tensor(end)).item() for end in (-math.inf, math.inf)]
    for neighbour in towards:
        if math.isfinite(neighbour):
            assert abs(total - Fraction(result)) <= abs(total - Fraction(neighbour))


def test_the_calls_of_ltx_core(device: str) -> None:
    """x fp32 with bf16 y, the gate a strided view; then the pair is dequantized."""
    x, y = torch.randn(2, 6, 512, device=device), torch.randn(2, 6, 512, device=device).bfloat16()
    gate = torch.randn(2, 1, 3, 512, device=device).bfloat16().unbind(dim=2)[2]
    expected_x = fma(y.cpu(), gate.cpu(), x.cpu())
    values = blockwise_dequantize(blockwise_quantize_rms_fma_triton(x, y, gate))
    assert_bits(x, expected_x)
    assert ((values.cpu() - exact(expected_x)).abs() <= exact(expected_x).abs() / 16 + 0.01).all()


def test_views_of_one_allocation(device: str) -> None:
    """The chunks of a fused projection, tokens of one sequence, rows in turn: no shared element, so no objection."""
    fused = torch.randn(2, 6, 3 * 200, device=device)
    for views in (fused.chunk(3, dim=-1), fused[..., :200].split(2, dim=1), [fused[:, i::3, :200] for i in range(3)]):
        x, y, z = views
        whole = fused.clone()
        expected_x = fma(y.cpu(), z.cpu(), x.cpu())
        assert_rounded_once(rms_fma_triton(x, y, z), exact(expected_x), exact(expected_x).abs())
        assert_bits(x, expected_x)
        new = fused.clone()
        x.fill_(0)
        changed = fused != new
        assert torch.equal(new[~changed], whole[~changed])  # nothing beside x was written to
        fused.copy_(whole)


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("where", ["x", "y", "z"])
def test_extreme_values(name: str, where: str, device: str) -> None:
    tensors = {key: torch.randn(2, 3, 384) for key in ("x", "y", "z")}
    tensors[where][1, 1, 128:256] = extreme_block(name)
    assert_fma(*(tensors[key].to(device) for key in ("x", "y", "z")))


def test_a_zero_row_gives_zeros(device: str) -> None:
    x, zeros = torch.zeros(2, 200, device=device), torch.zeros(2, 200, device=device)
    assert not rms_fma_triton(x, zeros, zeros).any()
    q, scales = blockwise_quantize_rms_fma_triton(x, zeros, zeros)
    assert not q.view(torch.uint8).any() and (scales > 0).all() and scales.isfinite().all()


def test_rows_that_overflow_are_poisoned_and_no_other(device: str) -> None:
    x = torch.ones(4, 300, device=device)
    x[1] = 1e19
    zeros = torch.zeros_like(x)
    q, scales = blockwise_quantize_rms_fma_triton(x, zeros, zeros)
    assert scales.isnan().all(-1).tolist() == [False, True, False, False]
    assert not q[1].view(torch.uint8).any()
    assert rms_fma_triton(x, zeros, zeros).isnan().all(-1).tolist() == [False, True, False, False]


@settings(deadline=None, max_examples=60)
@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    hidden=st.integers(1, 300),
    gap=st.integers(0, 20),
    exponents=st.tuples(*[st.integers(-20, 17)] * 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    broadcast=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_shape_stride_and_value(
    leading: list[int],
    hidden: int,
    gap: int,
    exponents: tuple[int, int, int],
    dtype: torch.dtype,
    broadcast: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shape = (*leading, hidden + gap)
    x = (torch.randn(shape) * 2.0 ** exponents[0]).to(dtype)[..., gap:]
    y = (torch.randn(shape) * 2.0 ** exponents[1])[..., gap:]
    z = (torch.randn(shape[-1:] if broadcast else shape) * 2.0 ** exponents[2])[..., gap:]
    assert_fma(x, y, z)


@settings(deadline=None, max_examples=300)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    x_strides=st.tuples(*[st.integers(0, 13)] * 2),
    y_strides=st.tuples(*[st.integers(0, 13)] * 2),
    offsets=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_overlap_is_told_element_by_element(
    sizes: list[int], x_strides: tuple[int, int], y_strides: tuple[int, int], offsets: tuple[int, int]
) -> None:
    memory = torch.zeros(100)
    x, y = (
        memory.as_strided(sizes, [*strides[: len(sizes) - 1], 1], offset)
        for strides, offset in zip((x_strides, y_strides), offsets, strict=True)
    )
    places = torch.arange(100)
    x_places, y_places = (places.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist() for t in (x, y))
    try:
        bf16_op(x, y, torch.zeros(sizes[-1]))
        message = ""
    except RuntimeError as error:
        message = str(error)
    if len(set(x_places)) < len(x_places):
        assert message.startswith("rms_fma: x must not overlap itself")
    elif not message.startswith("rms_fma: x must not overlap itself"):  # strides that do not nest are refused too
        assert message.startswith("rms_fma: y must not overlap x") == bool(set(x_places) & set(y_places))


def test_overlap_messages_leave_x_as_it_was() -> None:
    x = torch.randn(4, 64)
    before, zeros = x.clone(), torch.zeros(4, 64)
    wide = torch.randn(4 * 64 + 1)
    for name, function in [("rms_fma_quantize", blockwise_quantize_rms_fma_triton), ("rms_fma", rms_fma_triton)]:
        for arguments, message in [
            ((x, x, zeros), "y must not overlap x, got one that shares memory with it"),
            ((x, zeros, x[1:2]), "z must not overlap x, got one that shares memory with it"),
            (
                (wide[1:].view(4, 64), wide[:-1].view(4, 64), zeros),
                "y must not overlap x, got one that shares memory with it",
            ),
            ((x[:1].expand(4, 64), zeros, zeros), "x must not overlap itself, got sizes [4, 64] with strides [0, 1]"),
        ]:
            with pytest.raises(RuntimeError, match=f"^{re.escape(f'{name}: {message}')}$"):
                function(*arguments)
        assert_bits(x, before)


GOOD = {"x": torch.zeros(2, 5, 8), "y": torch.zeros(2, 5, 8), "z": torch.zeros(2, 1, 8)}


@pytest.mark.parametrize(("name", "function"), [("rms_fma_quantize", BOTH[0]), ("rms_fma", BOTH[1])])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 5, 8).int()}, "x must be bfloat16, float16 or float32, got int32"),
        ({"x": torch.zeros(())}, "x must have 1 to 8 dimensions, got []"),
        ({"x": torch.zeros(2, 8, 5).mT}, "x must have a contiguous last dimension, got stride 5"),
        ({"y": torch.zeros(2, 1, 8)}, "y must have shape [2, 5, 8] like x, got [2, 1, 8]"),
        ({"y": torch.zeros(2, 5, 8).double()}, "y must be bfloat16, float16 or float32, got float64"),
        ({"y": torch.zeros(2, 8, 5).mT}, "y must have a contiguous last dimension, got stride 5"),
        ({"z": torch.zeros(3, 1, 8)}, "z must broadcast to [2, 5, 8] with a last size of 8, got [3, 1, 8]"),
        ({"z": torch.zeros(8).int()}, "z must be bfloat16, float16 or float32, got int32"),
        ({"z": torch.zeros(16)[::2]}, "z must have a contiguous last dimension, got stride 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(name: str, function: Callable[..., object], change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'{name}: {message}')}$"):
        function(**(GOOD | change))


@pytest.mark.parametrize(("name", "function"), [("rms_fma_quantize", BOTH[0]), ("rms_fma", BOTH[1])])
def test_requires_grad(name: str, function: Callable[..., object]) -> None:
    x = torch.ones(2, 8, requires_grad=True)
    y, z = torch.ones(2, 8), torch.ones(8)
    message = rf"^{name}: x must not require grad \(it is written to\), use torch.no_grad\(\)$"
    with pytest.raises(RuntimeError, match=message):
        function(x, y, z)
    assert (x == 1).all()
    with torch.no_grad():
        function(x, y, z)
    assert (x == 2).all()


@pytest.mark.parametrize(("name", "function"), [("rms_fma_quantize", BOTH[0]), ("rms_fma", BOTH[1])])
def test_y_that_requires_grad(name: str, function: Callable[..., object]) -> None:
    """Forward runs; a backward through the result or through x raises instead of leaving y out."""
    x, y, z = torch.ones(2, 8), torch.ones(2, 8, requires_grad=True), torch.ones(8)
    result = function(x, y, z)
    assert (x == 2).all()
    for value in (x, result[0] if isinstance(result, tuple) else result):
        with pytest.raises(RuntimeError, match=f"^{name}: has no backward, use torch.no_grad\\(\\)$"):
            value.float().sum().backward()


@pytest.mark.parametrize(("name", "function"), [("rms_fma_quantize", BOTH[0]), ("rms_fma", BOTH[1])])
def test_forward_mode_raises_before_x_is_written(name: str, function: Callable[..., object]) -> None:
    x, y, z = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)
    with pytest.raises(RuntimeError, match=f"^{name}: has no forward-mode derivative, "):
        torch.func.jvp(lambda y: function(x, y, z), (y,), (y,))
    assert (x == 1).all()


@pytest.mark.parametrize("function", BOTH)
def test_backward_of_an_op_that_saved_x_raises(function: Callable[..., object]) -> None:
    x, factor = torch.ones(2, 8), torch.ones(2, 8, requires_grad=True)
    product = factor * x
    with torch.no_grad():
        function(x, torch.ones(2, 8), torch.ones(8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        function(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8))  # has no version to count up


@pytest.mark.parametrize("function", BOTH)
def test_arguments_that_are_no_tensors(function: Callable[..., object]) -> None:
    x = torch.ones(2, 8)
    for wrong in ("x", 3, [x]):
        for arguments in ((wrong, x, x), (x, wrong, x), (x, x, wrong)):
            with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
                function(*arguments)


def test_opcheck(device: str) -> None:
    for hidden in (200, 128):
        for overload in (op, bf16_op):
            x, y, z = torch.randn(2, 3, hidden), torch.randn(2, 3, hidden), torch.randn(2, 1, hidden)
            torch.library.opcheck(serving(overload, torch.device(device)), (x.to(device), y.to(device), z.to(device)))


@pytest.mark.parametrize("function", BOTH)
def test_behaviour_and_graphs(function: Callable[..., object], device: str) -> None:
    def inputs(batch: int, tokens: int, hidden: int) -> list[Tensor]:
        shapes = [(batch, tokens, hidden), (batch, tokens, hidden), (batch, 1, hidden)]
        return [torch.randn(shape, device=device) for shape in shapes]

    def with_x(x: Tensor, y: Tensor, z: Tensor) -> tuple[object, Tensor]:
        result = function(x, y, z)
        return result, x + 0

    assert_repeatable(with_x, inputs(2, 33, 200))
    assert_compiles(with_x, inputs(2, 5, 256), inputs(3, 7, 200))
    assert_compiles(lambda fused: (function(*fused.chunk(3, dim=-1)), fused + 0), inputs(2, 5, 600)[:1])
    if device == "cuda":
        assert_captures(with_x, inputs(2, 5, 200), inputs(2, 5, 200))
