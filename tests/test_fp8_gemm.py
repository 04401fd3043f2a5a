"""fp8_gemm on every device, against the float64 product of the dequantized operands."""

import random
import re

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

from ltx_kernels._backends import backend_lacks
from ltx_kernels.blockwise import blockwise_fp8_gemm, fp6_pack_tensor, fp6_unpack_tensor, gemm_config, get_backend

OP = "fp8_gemm"
FP8 = torch.float8_e4m3fn
op = torch.ops.ltx_kernels.fp8_gemm.default


def blocks(size: int) -> int:
    return -(-size // 128)


def make_inputs(case: GemmCase, device: str) -> list:
    """The torch op's arguments."""
    m, n, k = case.m, case.n, case.k
    a, b = (torch.rand(rows, k) if case.one_sign else torch.randn(rows, k) for rows in (m, n))
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
    scales = scales.double().repeat_interleave(rows_per_scale, 0)[:rows]
    return q.double() * scales.repeat_interleave(128, 1)[:, :k]


def exact(inputs: list) -> tuple[Tensor, Tensor]:
    """The result and the sum of the magnitudes that enter it, in float64."""
    a, a_scales, b, b_scales, bias, residual = inputs[:6]
    if b.dtype == torch.uint8:
        b = fp6_unpack_tensor(b.cpu(), a.shape[1]).view(FP8).to(a.device)
    a, b = dequantized(a, a_scales, 1), dequantized(b, b_scales, 128)
    out, magnitude = a @ b.T, a.abs() @ b.abs().T
    for term in (bias, residual):
        if term is not None:
            out, magnitude = out + term.double(), magnitude + term.double().abs()
    return out, magnitude


FEWEST_FOR_A_NORM = 2000  # elements; over fewer, what tensor cores drop does not average out


def assert_close(out: Tensor, inputs: list, one_sign: bool) -> None:
    """Each element within what its formula's fp32 roundings add up to; on a GPU also what its tensor cores drop."""
    expected, magnitude = (t.cpu() for t in exact(inputs))
    on_cpu = out.device.type == "cpu"
    k = inputs[0].shape[1]
    # The longest chain of roundings: the additions in a block, two products with scales, an addition a block, bias and
    # residual. The products of e4m3 values are exact.
    roundings = min(k, 128) + 2 + blocks(k) + 2
    relative = roundings * 2.0**-24 if on_cpu else 2.0**-10
    error = (out.cpu().double() - expected).abs()
    assert (error <= unit_in_last_place(expected, out.dtype) / 2 + magnitude * relative).all()
    if out.dtype == FP32 and out.numel() >= (1 if on_cpu else FEWEST_FOR_A_NORM):
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
    for use_fast_accum in (False, True):  # half precision would be infinite
        assert op(a, one, b, one, None, None, use_fast_accum, FP32).tolist() == [[3211264.0] * 8]


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


H200 = {"num_sms": 132, "capability": (9, 0)}


def test_gemm_config_is_a_function_of_its_arguments() -> None:
    config = gemm_config(4096, 4096, 4096, **H200)
    assert config == (90, 128, 256, 4, 2, 1, 4)
    assert config._fields == ("arch", "tile_m", "tile_n", "stages", "cluster_m", "split_k", "band")
    assert gemm_config(126, 2048, 2048, **H200).split_k == 2
    assert gemm_config(4096, 4096, 4096, num_sms=1, capability=(9, 0)).cluster_m == 1
    for capability in ((8, 9), (10, 0), (12, 0), (12, 1)):
        assert gemm_config(32768, 4096, 4096, num_sms=142, capability=capability) == (89, 128, 128, 3, 1, 1, 8)
    with pytest.raises(RuntimeError) as error:
        gemm_config(4096, 4096, 4096, num_sms=108, capability=(8, 0))
    assert str(error.value) == "gemm_config: capability must be one with a kernel of fp8_gemm, got 8.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": -1}, "m must be an integer from 0 to 2^30, got -1"),
        ({"m": 1.0}, "m must be an integer from 0 to 2^30, got 1.0"),
        ({"m": 2**30 + 1}, "m must be an integer from 0 to 2^30, got 1073741825"),
        ({"n": 12}, "n must be a multiple of 8 from 8 to 2^30, got 12"),
        ({"n": 0}, "n must be a multiple of 8 from 8 to 2^30, got 0"),
        ({"k": 8}, "k must be a multiple of 16 from 16 to 2^30, got 8"),
        ({"k": 2**64}, "k must be a multiple of 16 from 16 to 2^30, got 18446744073709551616"),
        ({"num_sms": 0}, "num_sms must be an integer from 1 to 2^30, got 0"),
        ({"num_sms": 2**32}, "num_sms must be an integer from 1 to 2^30, got 4294967296"),
        *(
            ({"capability": value}, f"capability must be a pair such as (9, 0), got {value!r}")
            for value in (90, (9,), (9, 0, 0), (9.0, 0), ("9", 0), (9, None), (8, 10), (10, -10))
        ),
        ({"capability": (7, 5)}, "capability must be one with a kernel of fp8_gemm, got 7.5"),
    ],
)
def test_gemm_config_messages(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape('gemm_config: ' + message)}$"):
        gemm_config(**{"m": 4, "n": 8, "k": 16, **H200, **change})


def test_gemm_config_of_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        RuntimeError, match="^gemm_config: num_sms and capability must be given where there is no GPU, "
    ):
        gemm_config(4, 8, 16)


def test_operands_that_are_no_pairs() -> None:
    a, a_scales, b, b_scales = make_inputs(GemmCase("pairs"), "cpu")[:4]
    for value, got in ((a, "Tensor"), ((a, a_scales, a), "3 entries"), (None, "NoneType")):
        for name, operands in (("a", (value, (b, b_scales))), ("b", ((a, a_scales), value))):
            with pytest.raises(TypeError, match=f"^fp8_gemm: {name} must be a pair \\(q, scales\\), got {got}$"):
                blockwise_fp8_gemm(*operands, None, False)


def has_sm90() -> bool:
    built = "sm_90a" in torch.ops.ltx_kernels.built_architectures().split()
    return built and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


on_gpu = pytest.mark.skipif(not has_sm90(), reason="needs a GPU of compute capability 9.0 and a build with its code")


def all_configs() -> list[list[int]]:
    """Every configuration that this device's sizes lead to."""
    ms, ns = (1, 64, 126, 512, 1024, 2048, 4096, 32768), (64, 2048, 4096, 5120, 16384)
    sizes = ((m, n, k) for m in ms for n in ns for k in (128, 4096))
    return [list(config) for config in sorted({gemm_config(*size) for size in sizes})]


def splits(config: list[int]) -> int:
    return config[5]


# The kernel for mma.sync, which runs here on 9.0 and only when forced.
SM89_CONFIGS = [[89, 128, 128, 3, 1, 1, 8], [89, 128, 64, 4, 1, 1, 8], [89, 64, 64, 3, 1, 1, 8]]
chosen_or_sm89 = pytest.mark.parametrize("config", [None, *SM89_CONFIGS], ids=["chosen", "128x128", "128x64", "64x64"])


@on_gpu
def test_every_configuration_of_sm90_is_reached() -> None:
    if torch.cuda.get_device_capability() == (9, 0) and torch.cuda.get_device_properties().multi_processor_count == 132:
        assert len(all_configs()) == 8


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32])
@pytest.mark.parametrize("residual", [False, True])
def test_every_configuration_at_edges(dtype: torch.dtype, residual: bool) -> None:
    """Poison lies around every operand; the sizes leave partial tiles, clusters and k blocks, and make several waves."""
    for m, n, k in ((1, 8, 16), (7, 120, 144), (65, 264, 400), (130, 1280, 272), (300, 640, 1280), (2500, 2568, 640)):
        case = GemmCase("forced", m, n, k, dtype, bias=True, residual=residual, a_gap=16, b_gap=32)
        inputs = make_inputs(case, "cuda")
        for config in (*all_configs(), *SM89_CONFIGS):
            if splits(config) <= blocks(k):
                out = op(*inputs, config)
                assert_close(out, inputs, False)
                assert_same_bits(op(*inputs, config), out)


def pool(rows: int, columns: int, *, one_sign: bool = False) -> Tensor:
    draw = torch.rand if one_sign else torch.randn
    return draw(rows, columns, device="cuda").to(FP8)


@on_gpu
def test_grid_of_sizes() -> None:
    """The rows of the largest m are those of the smaller ones, so that one reference serves all."""
    ms = (1, 2, 7, 8, 63, 64, 65, 126, 127, 128, 129, 255, 1000, 4097)
    for k in (16, 128, 144, 400, 640, 2048, 4096, 8192):
        a = pool(ms[-1], k)
        a_scales = torch.rand(blocks(k), 4100, device="cuda").t()[: ms[-1]] + 0.5
        for n in (8, 64, 120, 640, 2560, 4096, 5120):
            b, b_scales = pool(n, k), torch.rand(blocks(n), blocks(k), device="cuda") + 0.5
            expected, magnitude = exact([a, a_scales, b, b_scales, None, None])
            for m in ms:
                out = op(a[:m], a_scales[:m], b, b_scales, None, None, False, FP32)
                error = (out.double() - expected[:m]).abs()
                assert (error <= magnitude[:m] * 2.0**-10).all(), (m, n, k)
                assert m * n < FEWEST_FOR_A_NORM or error.norm() < 1.6e-4 * expected[:m].norm(), (m, n, k)


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sm89_against_float64(case: GemmCase) -> None:
    inputs = make_inputs(case, "cuda")
    for config in SM89_CONFIGS:
        assert_close(op(*inputs, config), inputs, case.one_sign)


@on_gpu
@chosen_or_sm89
def test_random_sizes_and_layouts(config: list[int] | None) -> None:
    generator = random.Random(0)
    for _ in range(1000):
        case = GemmCase(
            "drawn",
            m=generator.randint(0, 400),
            n=8 * generator.randint(1, 80),
            k=16 * generator.randint(1, 80),
            out_dtype=generator.choice([torch.bfloat16, torch.float16, FP32]),
            bias=generator.random() < 0.5,
            residual=generator.random() < 0.5,
            fp6=generator.random() < 0.2,
            scale_layout=generator.choice(["padded", "cloned", "row-major", "broadcast"]),
            scale_dtype=generator.choice([torch.bfloat16, torch.float16, FP32]),
            a_gap=generator.choice([0, 16, 64]),
            b_gap=generator.choice([0, 16]),
        )
        inputs = make_inputs(case, "cuda")
        assert_close(op(*inputs, config), inputs, False)


@on_gpu
@chosen_or_sm89
def test_views_that_are_copied_or_read_element_by_element(config: list[int] | None) -> None:
    m, n, k = 70, 136, 272
    inputs = make_inputs(GemmCase("views", m, n, k, bias=True, residual=True), "cuda")
    expected = op(*inputs, config)
    bias = torch.full((3 * n,), torch.nan, device="cuda")[1::3]
    odd_bias = torch.full((n + 1,), torch.nan, device="cuda")[1:]
    odd_residual = torch.full((m, n + 3), torch.nan, device="cuda", dtype=torch.bfloat16)[:, 1 : n + 1]
    wide_b_scales = torch.full((2 * blocks(n), 3 * blocks(k)), torch.nan, device="cuda")[::2, ::3]
    for view, slot in ((bias, 4), (odd_bias, 4), (odd_residual, 5), (wide_b_scales, 3)):
        assert_same_bits(op(*inputs[:slot], view.copy_(inputs[slot]), *inputs[slot + 1 :], config), expected)


@on_gpu
@chosen_or_sm89
def test_one_row_of_a_for_all(config: list[int] | None) -> None:
    inputs = make_inputs(GemmCase("expanded", m=1), "cuda")
    expected = op(*inputs, config).expand(70, -1)
    inputs[0], inputs[1] = inputs[0].expand(70, -1), inputs[1].expand(70, -1)
    assert_same_bits(op(*inputs, config), expected)


@on_gpu
@chosen_or_sm89
def test_stride_of_a_single_row_may_be_anything(config: list[int] | None) -> None:
    inputs = make_inputs(GemmCase("one row", m=1, k=272), "cuda")
    expected = op(*inputs, config)
    for stride in (1, 280, 2**40 + 8):
        inputs[0] = inputs[0].as_strided((1, 272), (stride, 1))
        assert_same_bits(op(*inputs, config), expected)


@on_gpu
@pytest.mark.parametrize("config", SM89_CONFIGS, ids=str)
def test_sm89_never_reads_past_the_last_row(config: list[int]) -> None:
    m, n, k = 65, 136, 272
    inputs = make_inputs(GemmCase("clean", m, n, k, residual=True), "cuda")
    expected = op(*inputs, config)
    a = torch.full((m + 70, k), torch.nan, device="cuda").to(FP8)
    a_scales = torch.full((blocks(k), 136), torch.inf, device="cuda").t()  # read in place
    for wide, slot in ((a, 0), (a_scales, 1)):
        wide[:m].copy_(inputs[slot])
        inputs[slot] = wide[:m]
    assert_same_bits(op(*inputs, config), expected)


@on_gpu
@chosen_or_sm89
def test_offsets_past_2_31(config: list[int] | None) -> None:
    n, k = 8, 144
    inputs = make_inputs(GemmCase("far", 4, n, k, residual=True), "cuda")
    expected = op(*inputs, config)
    far = torch.empty(3 * 2**30 + 256, dtype=torch.uint8, device="cuda").view(FP8)
    a = far.as_strided((4, k), (2**30, 1))
    assert_same_bits(op(a.copy_(inputs[0]), *inputs[1:], config), expected)
    residual = far.view(torch.bfloat16).as_strided((4, n), (2**29, 1))
    assert_same_bits(op(*inputs[:5], residual.copy_(inputs[5]), *inputs[6:], config), expected)
    b = far.as_strided((n, k), (3 * 2**30 // n // 16 * 16, 1))
    assert_same_bits(op(*inputs[:2], b.copy_(inputs[2]), *inputs[3:], config), expected)
    del far, a, b, residual
    m, n, k = 2**17 + 8, 2**14 + 8, 16  # the output has more than 2^31 elements
    a, b = pool(m, k), pool(n, k)
    a_scales, b_scales = torch.rand(1, m, device="cuda").t(), torch.rand(blocks(n), 1, device="cuda")
    out = op(a, a_scales, b, b_scales, None, None, False, torch.bfloat16, config)
    last = op(a[-8:].clone(), a_scales[-8:], b, b_scales, None, None, False, torch.bfloat16, config)
    assert_same_bits(out[-8:], last)


@on_gpu
@pytest.mark.parametrize(("one_sign", "bound"), [(False, 1.6e-4), (True, 6e-4)])
def test_error_of_fp32_output(one_sign: bool, bound: float) -> None:
    for k in (4096, 65536):
        a, b = pool(256, k, one_sign=one_sign), pool(512, k, one_sign=one_sign)
        inputs = [a, torch.ones(256, blocks(k), device="cuda"), b, torch.ones(4, blocks(k), device="cuda"), None, None]
        expected, _ = exact(inputs)
        for config in (*all_configs(), *SM89_CONFIGS):
            error = (op(*inputs, False, FP32, config).double() - expected).norm() / expected.norm()
            assert error < bound, (k, config, error)


@on_gpu
@pytest.mark.parametrize("config", SM89_CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32])
def test_half_precision_sums(dtype: torch.dtype, config: list[int]) -> None:
    """Of the additions of a block, up to 8 where mma is emulated, each may lose 2^-11 of what is added up."""
    for m, n, k in ((1, 8, 16), (65, 264, 400), (300, 640, 1280)):
        case = GemmCase("half", m, n, k, dtype, bias=True, residual=True, fp6=True, a_gap=16, b_gap=16)
        inputs = make_inputs(case, "cuda")
        inputs[0].view(torch.uint8)[0, k - 1] = 0xFF
        inputs[6] = True
        out = op(*inputs, config)
        assert torch.equal(out.isnan(), (torch.arange(m, device="cuda") == 0)[:, None].expand(m, n))
        expected, magnitude = exact(inputs)
        error = (out.double() - expected).abs()
        assert (error <= unit_in_last_place(expected, dtype) / 2 + magnitude * 2.0**-8)[1:].all(), (m, n, k)
        assert_same_bits(op(*inputs, config), out)


@on_gpu
@pytest.mark.parametrize("config", SM89_CONFIGS, ids=str)
@pytest.mark.parametrize("a_value", [448.0, -448.0])
def test_half_precision_sums_at_the_bound_of_their_range(a_value: float, config: list[int]) -> None:
    """No sum over a block can be larger than these 6720. They are exact, as all on the way to them are halves."""
    m, n, k = 70, 136, 4096
    a = torch.full((m, k), a_value, device="cuda").to(FP8)
    b = fp6_pack_tensor(torch.full((n, k), 0.1171875, device="cuda").to(FP8))
    a_scales, b_scales = torch.ones(m, blocks(k), device="cuda"), torch.ones(blocks(n), blocks(k), device="cuda")
    out = op(a, a_scales, b, b_scales, None, None, True, FP32, config)
    assert out.unique().tolist() == [a_value * 0.1171875 * k]


@on_gpu
@pytest.mark.parametrize("one_sign", [False, True])
def test_error_of_half_precision_sums(one_sign: bool) -> None:
    for k in (4096, 65536):
        case = GemmCase("half", 256, 512, k, FP32, fp6=True, one_sign=one_sign)
        inputs = make_inputs(case, "cuda")
        inputs[6] = True
        expected, _ = exact(inputs)
        for config in SM89_CONFIGS:
            error = (op(*inputs, config).double() - expected).norm() / expected.norm()
            assert error < 2e-3, (k, config, error)


@on_gpu
@chosen_or_sm89
def test_use_fast_accum_is_for_fp6_and_sm89(config: list[int] | None) -> None:
    for fp6 in (False, True):
        inputs = make_inputs(GemmCase("hint", fp6=fp6, out_dtype=FP32), "cuda")
        same = torch.equal(op(*inputs, config), op(*inputs[:6], True, FP32, config))
        assert same == (config is None or not fp6)
    a, b = (torch.full((rows, 128), 448.0, device="cuda").to(FP8) for rows in (1, 8))
    one = torch.ones(1, 1, device="cuda")
    assert op(a, one, b, one, None, None, True, FP32, config).tolist() == [[128 * 448.0**2] * 8]


@on_gpu
@chosen_or_sm89
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32])
def test_nan_bits_are_those_of_the_cpu(dtype: torch.dtype, config: list[int] | None) -> None:
    inputs = make_inputs(GemmCase("nan", m=3, out_dtype=dtype, residual=True), "cpu")
    inputs[1][1] = -torch.nan
    inputs[5][2] = -torch.nan
    bits = torch.int32 if dtype == FP32 else torch.int16
    on_gpu = op(*(t.cuda() if isinstance(t, Tensor) else t for t in inputs), config).cpu()
    assert torch.equal(on_gpu[1:].view(bits), op(*inputs)[1:].view(bits))


def gpu_refusals() -> list[tuple[dict[str, object], str]]:
    a, b = (torch.zeros(5000, dtype=torch.uint8, device="cuda").view(FP8) for _ in range(2))
    good = list(gemm_config(3, 8, 144))
    return [
        (
            {"a": a.as_strided((3, 144), (152, 1))},
            "a must have a row stride that is a multiple of 16 on a GPU, got 152",
        ),
        (
            {"b": b.as_strided((8, 144), (150, 1))},
            "b must have a row stride that is a multiple of 16 on a GPU, got 150",
        ),
        (
            {"a": a[8 : 8 + 432].view(3, 144)},
            "a must start at a multiple of 16 bytes on a GPU, got an address 8 bytes past one",
        ),
        (
            {"b": b[1 : 1 + 1152].view(8, 144)},
            "b must start at a multiple of 16 bytes on a GPU, got an address 1 bytes past one",
        ),
        ({"config": [90]}, "config must have 7 values, got 1 values"),
        (
            {"config": [89, *good[1:]]},
            "config must be one that gemm_config could return for this k, got another",
        ),
        (
            {"config": [*good[:1], 100, *good[2:]]},
            "config must be one that gemm_config could return for this k, got another",
        ),
    ]


@on_gpu
def test_refuses_on_a_gpu() -> None:
    for changes, message in gpu_refusals():
        with pytest.raises(RuntimeError) as error:
            op(*replaced(GemmCase("refused", 3, 8, 144), "cuda", **changes))
        assert str(error.value) == f"fp8_gemm: {message}"


def test_refuses_a_gpu_without_a_kernel() -> None:
    if not torch.cuda.is_available() or not torch.ops.ltx_kernels.built_architectures() or has_sm90():
        pytest.skip("needs a build with CUDA code and a GPU that is not of compute capability 9.0")
    lacks = r"needs sm_90, device 0 is sm_\d+"
    with pytest.raises(RuntimeError, match=rf"^fp8_gemm: a must be on cpu \({lacks}\), got cuda:0$"):
        op(*make_inputs(GemmCase("refused"), "cuda"))
    assert re.fullmatch(lacks, backend_lacks("cuda", torch.device("cuda"), "fp8_gemm"))
    assert get_backend("linear", "cuda") == "dequantize"
