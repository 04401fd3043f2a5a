"""fp8_gemm on every device, against the float64 product of the dequantized operands."""

import pytest
import torch
from behaviour import (
    assert_captures,
    assert_compiles,
    assert_inputs_untouched,
    assert_no_backward,
    assert_repeatable,
    assert_same_bits,
    assert_uses_current_stream,
    assert_uses_own_device,
)
from cases.fp8_gemm import CASES, FP32, GemmCase, lay_out, lay_out_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import unit_in_last_place
from torch import Tensor

from ltx_kernels.blockwise import blockwise_fp8_gemm, fp6_pack_tensor, fp6_unpack_tensor, gemm_config

OP = "fp8_gemm"
FP8 = torch.float8_e4m3fn
op = torch.ops.ltx_kernels.fp8_gemm.default


def blocks(size: int) -> int:
    return -(-size // 128)


def make_inputs(case: GemmCase, device: str) -> list:
    """The torch op's arguments."""
    m, n, k = case.m, case.n, case.k
    a, b = (torch.randn(rows, k) for rows in (m, n))
    if case.one_sign:
        a, b = a.abs(), b.abs()
    b8 = ((b / 40).clamp(-0.1171875, 0.1171875) if case.fp6 else b).to(FP8)
    stored = fp6_pack_tensor(b8) if case.fp6 else b8
    a_scales = (torch.rand(m, blocks(k)) + 0.5).to(case.scale_dtype)
    b_scales = (torch.rand(blocks(n), blocks(k)) + 0.5).to(case.scale_dtype)
    return [
        lay_out(a.to(FP8).to(device), case.a_gap),
        lay_out_scales(a_scales.to(device), case.scale_layout),
        lay_out(stored.to(device), case.b_gap),
        b_scales.to(device),
        torch.randn(n).to(device) if case.bias else None,
        torch.randn(m, n).to(case.out_dtype).to(device) if case.residual else None,
        False,
        case.out_dtype,
    ]


def dequantized(q: Tensor, scales: Tensor, rows_per_scale: int) -> Tensor:
    rows, k = q.shape
    scales = scales.cpu().double().repeat_interleave(rows_per_scale, 0)[:rows]
    return q.cpu().double() * scales.repeat_interleave(128, 1)[:, :k]


def exact(inputs: list) -> tuple[Tensor, Tensor]:
    """The result and the sum of the magnitudes that enter it, in float64 on the CPU."""
    a, a_scales, b, b_scales, bias, residual = inputs[:6]
    if b.dtype == torch.uint8:
        b = fp6_unpack_tensor(b.cpu(), a.shape[1]).view(FP8)
    a, b = dequantized(a, a_scales, 1), dequantized(b, b_scales, 128)
    out, magnitude = a @ b.T, a.abs() @ b.abs().T
    for term in (bias, residual):
        if term is not None:
            out, magnitude = out + term.cpu().double(), magnitude + term.cpu().double().abs()
    return out, magnitude


def assert_close(out: Tensor, inputs: list, one_sign: bool) -> None:
    """Each element within what its formula's fp32 roundings add up to; on a GPU also what its tensor cores drop."""
    expected, magnitude = exact(inputs)
    on_cpu = out.device.type == "cpu"
    k = inputs[0].shape[1]
    # The longest chain of roundings: the additions in a block, two products with scales, an addition a block, bias and
    # residual. The products of e4m3 values are exact.
    roundings = min(k, 128) + 2 + blocks(k) + 2
    relative = roundings * 2.0**-24 if on_cpu else 2.0**-10
    error = (out.cpu().double() - expected).abs()
    assert (error <= unit_in_last_place(expected, out.dtype) / 2 + magnitude * relative).all()
    if out.dtype == FP32 and out.numel():
        assert error.norm() / expected.norm() < (2e-6 if on_cpu else 6e-4 if one_sign else 1.6e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: GemmCase, device: str) -> None:
    inputs = make_inputs(case, device)
    out = op(*inputs)
    assert out.shape == (case.m, case.n) and out.dtype == case.out_dtype and out.is_contiguous()
    assert_close(out, inputs, case.one_sign)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 140),
    n=st.integers(1, 40).map(lambda x: 8 * x),
    k=st.integers(1, 40).map(lambda x: 16 * x),
    out_dtype=st.sampled_from([torch.bfloat16, torch.float16, FP32]),
    bias=st.booleans(),
    residual=st.booleans(),
    fp6=st.booleans(),
    scale_layout=st.sampled_from(["padded", "cloned", "row-major", "broadcast"]),
    a_gap=st.sampled_from([0, 16, 64]),
    b_gap=st.sampled_from([0, 16]),
    one_sign=st.booleans(),
)
def test_any_size_and_layout(**choices: object) -> None:
    case = GemmCase("drawn", **choices)  # type: ignore[arg-type]
    inputs = make_inputs(case, "cpu")
    assert_close(op(*inputs), inputs, case.one_sign)


@pytest.mark.parametrize("one_sign", [False, True])
def test_error_does_not_grow_with_k(one_sign: bool, device: str) -> None:
    case = GemmCase("long", m=4, n=16, k=65536, out_dtype=FP32, one_sign=one_sign)
    inputs = make_inputs(case, device)
    assert_close(op(*inputs), inputs, case.one_sign)


def test_scale_layouts_and_dtypes_give_the_same_bits(device: str) -> None:
    case = GemmCase("same", scale_dtype=torch.bfloat16)
    inputs = make_inputs(case, device)
    expected = op(*inputs)
    for layout in ("padded", "cloned", "row-major"):
        for dtype in (torch.bfloat16, FP32):
            other = list(inputs)
            other[1] = lay_out_scales(inputs[1].to(dtype), layout)
            other[3] = inputs[3].to(dtype)
            assert_same_bits(op(*other), expected)


def test_what_lies_past_the_last_row_is_never_read(device: str) -> None:
    m, n, k = 65, 136, 272
    inputs = make_inputs(GemmCase("clean", m, n, k, residual=True), device)
    expected = op(*inputs)
    a = torch.full((m + 70, k), torch.nan, device=device).to(FP8)
    a_scales = torch.full((blocks(k), m + 70), torch.inf, device=device).t()
    residual = torch.full((m + 70, n), torch.inf, device=device, dtype=torch.bfloat16)
    for wide, slot in ((a, 0), (a_scales, 1), (residual, 5)):
        wide[:m].copy_(inputs[slot])
        inputs[slot] = wide[:m]
    assert_same_bits(op(*inputs), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32])
def test_nan_poisons_what_it_enters_and_nothing_else(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(GemmCase("poisoned", m=6, n=264, k=272, out_dtype=dtype), device)
    clean = op(*inputs)
    inputs[0].view(torch.uint8)[1, 200] = 0xFF
    inputs[1][3, 2] = torch.nan
    inputs[2].view(torch.uint8)[5, 0] = 0x7F
    inputs[3][1, 0] = torch.nan
    out = op(*inputs)
    poisoned = torch.zeros(6, 264, dtype=torch.bool, device=device)
    poisoned[[1, 3]] = True
    poisoned[:, 5] = True
    poisoned[:, 128:256] = True
    assert torch.equal(out.isnan(), poisoned)
    assert torch.equal(out[~poisoned], clean[~poisoned])


def test_infinite_scale_and_overflow(device: str) -> None:
    a = torch.full((1, 16), 448.0, device=device).to(FP8)
    b = torch.full((8, 16), 448.0, device=device).to(FP8)
    one = torch.ones(1, 1, device=device)
    assert op(a, one, b, one * torch.inf, None, None, False, FP32).tolist() == [[torch.inf] * 8]
    assert op(a, one * 1e32, b, one * 10, None, None, False, torch.bfloat16).tolist() == [[torch.inf] * 8]
    assert op(a, one, b, one, None, None, False, torch.float16).tolist() == [[torch.inf] * 8]  # 3211264 > 65504
    assert op(a, one, b, one, None, None, False, FP32).tolist() == [[3211264.0] * 8]


def test_all_pairs_of_e4m3_values(device: str) -> None:
    """256 values of a against 256 of b, one product each."""
    a = torch.zeros(256, 16, dtype=torch.uint8)
    a[:, 3] = torch.arange(256)
    a = a.to(device)
    one_per_row, one_per_tile = torch.ones(256, 1, device=device), torch.ones(2, 1, device=device)
    out = op(a.view(FP8), one_per_row, a.view(FP8), one_per_tile, None, None, False, FP32).cpu()
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    expected = values[:, None] * values[None, :]
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_subnormal_values_survive_flush_to_zero() -> None:
    a = torch.full((1, 16), 1, dtype=torch.uint8).view(FP8)  # 2^-9
    b = torch.full((8, 16), 0x38, dtype=torch.uint8).view(FP8)  # 1
    one = torch.ones(1, 1)
    torch.set_flush_denormal(True)
    try:
        out = op(a, one, b, one, None, None, False, FP32)
    finally:
        torch.set_flush_denormal(False)
    assert out.tolist() == [[2.0**-5] * 8]


def test_public_function(device: str) -> None:
    case = GemmCase("public", bias=True, residual=True, out_dtype=torch.float16)
    a, a_scales, b, b_scales, bias, residual, _, out_dtype = inputs = make_inputs(case, device)
    out = blockwise_fp8_gemm((a, a_scales), (b, b_scales), bias, True, out_dtype=out_dtype, residual=residual)
    assert_same_bits(out, op(*inputs))
    bf16 = blockwise_fp8_gemm((a, a_scales), (b, b_scales), None, False)
    assert bf16.dtype == torch.bfloat16
    assert_same_bits(bf16, op(a, a_scales, b, b_scales, None, None, False, torch.bfloat16))


@pytest.mark.parametrize(
    "case",
    [
        GemmCase("plain", 7, 24, 144),
        GemmCase("all", 7, 24, 144, bias=True, residual=True, out_dtype=FP32),
        GemmCase("fp6", 2, 8, 16, fp6=True, scale_layout="row-major"),
        GemmCase("empty", m=0),
    ],
    ids=str,
)
def test_opcheck(case: GemmCase, device: str) -> None:
    # test_schema compares inputs before and after, which torch cannot do for fp8; assert_inputs_untouched does it.
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")
    inputs = make_inputs(case, device)
    torch.library.opcheck(op, tuple(inputs), test_utils=checks)
    assert_inputs_untouched(op, inputs)


def test_compiles_with_a_dynamic_number_of_rows(device: str) -> None:
    def function(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor) -> Tensor:
        return blockwise_fp8_gemm((a, a_scales), (b, b_scales), bias, False)

    weights = make_inputs(GemmCase("weights", bias=True), device)[2:5]
    assert_compiles(function, *([*make_inputs(GemmCase("rows", m=m), device)[:2], *weights] for m in (5, 64, 130)))


def test_repeatable(device: str) -> None:
    assert_repeatable(op, make_inputs(GemmCase("again", m=300, n=520, bias=True), device))


def test_backward_raises(device: str) -> None:
    a, a_scales, b, b_scales, bias, residual = make_inputs(GemmCase("grad", bias=True, residual=True), device)[:6]
    scales_and_bias = [a_scales, b_scales, bias]
    assert_no_backward(
        lambda a_scales, b_scales, bias: blockwise_fp8_gemm(
            (a, a_scales), (b, b_scales), bias, False, residual=residual
        ),
        scales_and_bias,
        "fp8_gemm",
    )


def test_graphs_and_streams(device: str) -> None:
    if device == "cpu":
        pytest.skip("CUDA graphs and streams need a GPU")
    inputs, others = (make_inputs(GemmCase("graph", bias=True), device) for _ in range(2))
    assert_captures(op, inputs, others)
    assert_uses_current_stream(op, inputs)
    if torch.cuda.device_count() > 1:
        assert_uses_own_device(op, inputs)


def replaced(case: GemmCase, device: str, **changes: object) -> list:
    names = ("a", "a_scales", "b", "b_scales", "bias", "residual", "use_fast_accum", "out_dtype", "config")
    inputs = [*make_inputs(case, device), None]
    for name, value in changes.items():
        inputs[names.index(name)] = value
    return inputs


def zeros(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(shape).to(dtype)


REFUSALS = [
    ({"a": zeros(3, 144, dtype=torch.float8_e5m2)}, "a must be float8_e4m3fn, got float8_e5m2"),
    ({"a": zeros(3, 144, dtype=torch.bfloat16)}, "a must be float8_e4m3fn, got bfloat16"),
    ({"b": zeros(8, 144, dtype=torch.float8_e5m2)}, "b must be float8_e4m3fn or uint8, got float8_e5m2"),
    ({"a_scales": zeros(3, 2, dtype=torch.float64)}, "a_scales must be bfloat16, float16 or float32, got float64"),
    ({"b_scales": zeros(1, 2, dtype=torch.int32)}, "b_scales must be bfloat16, float16 or float32, got int32"),
    ({"bias": zeros(8, dtype=torch.bfloat16)}, "bias must be float32, got bfloat16"),
    ({"residual": zeros(3, 8)}, "residual must be bfloat16, got float32"),
    ({"out_dtype": FP8}, "out_dtype must be bfloat16, float16 or float32, got float8_e4m3fn"),
    ({"a": zeros(1, 3, 144, dtype=FP8)}, "a must have 2 dimensions, got [1, 3, 144]"),
    ({"b": zeros(144, dtype=FP8)}, "b must have 2 dimensions, got [144]"),
    ({"a": zeros(3, 40, dtype=FP8)}, "a must have a last size that is a positive multiple of 16, got [3, 40]"),
    ({"a": zeros(3, 0, dtype=FP8)}, "a must have a last size that is a positive multiple of 16, got [3, 0]"),
    ({"b": zeros(12, 144, dtype=FP8)}, "b must have a first size that is a positive multiple of 8, got [12, 144]"),
    ({"b": zeros(8, 160, dtype=FP8)}, "b must have a last size of 144 like a, got [8, 160]"),
    (
        {"b": zeros(8, 144, dtype=torch.uint8)},
        "b must have a last size of 108, 3/4 of a's 144 (uint8 is packed fp6), got [8, 144]",
    ),
    ({"a_scales": zeros(2, 3)}, "a_scales must have shape [3, 2], got [2, 3]"),
    ({"b_scales": zeros(2, 1)}, "b_scales must have shape [1, 2], got [2, 1]"),
    ({"bias": zeros(9)}, "bias must have shape [8], got [9]"),
    ({"residual": zeros(3, 16, dtype=torch.bfloat16)}, "residual must have shape [3, 8], got [3, 16]"),
    ({"a": zeros(144, 3, dtype=FP8).t()}, "a must have a contiguous last dimension, got stride 3"),
    ({"b": zeros(144, 8, dtype=FP8).t()}, "b must have a contiguous last dimension, got stride 8"),
    (
        {"residual": zeros(8, 3, dtype=torch.bfloat16).t()},
        "residual must have a contiguous last dimension, got stride 3",
    ),
    ({"config": [128, 128]}, "config must be None on a cpu, got 2 values"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refuses(changes: dict[str, object], message: str) -> None:
    inputs = replaced(GemmCase("refused", 3, 8, 144), "cpu", **changes)
    with pytest.raises(RuntimeError) as error:
        op(*inputs)
    assert str(error.value) == f"fp8_gemm: {message}"


def test_refuses_tensors_on_two_devices(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a second device")
    for name, slot in (("a_scales", 1), ("b", 2), ("b_scales", 3), ("bias", 4), ("residual", 5)):
        inputs = make_inputs(GemmCase("mixed", bias=True, residual=True), device)
        inputs[slot] = inputs[slot].cpu()
        with pytest.raises(RuntimeError, match=f"fp8_gemm: {name} must be on cuda:0 like a, got cpu"):
            op(*inputs)


def test_gemm_config_says_that_there_is_no_kernel() -> None:
    with pytest.raises(RuntimeError, match="^gemm_config: fp8_gemm has no GPU kernel yet"):
        gemm_config(1024, 4096, 4096)
