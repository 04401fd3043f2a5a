"""The block of the demo: rotary tables by hand, the formulas it is compared with, and how a step is judged."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import unit_in_last_place

from ltx_kernels import _block, _compare, _exact
from ltx_kernels._block import Step

CPU = torch.device("cpu")


def test_positions_are_the_middles_of_the_latents_with_width_running_fastest() -> None:
    positions = _block.latent_positions((3, 1, 2))
    # Frames 0, 1 to 8 and 9 to 16, whose middles are 0.5, 5 and 13 of 24 a second; latents of 32 pixels.
    expected = [[seconds / 24, 16, x] for seconds in (0.5, 5, 13) for x in (16, 48)]
    torch.testing.assert_close(positions, torch.tensor(expected, dtype=torch.float64))


def test_rope_tables_by_hand() -> None:
    # hidden 16: two frequencies, pi/2 and 10000 pi/2, for each of three axes, and two entries over.
    # The positions are 0.00005, 0 and 0.5 of the range -1 to 1, so the angles are
    small, eighth = math.pi / 2 * 0.00005, math.pi / 4
    angles = [0, 0, small, 0, eighth, eighth, 0, 2500 * math.pi]
    cos, sin = _block.rope_tables(torch.tensor([[10.0005, 1024, 1536]], dtype=torch.float64), hidden=16, heads=2)
    root = math.sqrt(0.5)
    expected_cos = [1, 1, 1 - small**2 / 2, 1, root, root, 1, 1]
    expected_sin = [0, 0, small, 0, root, root, 0, 0]
    assert angles[4] == angles[5]
    assert cos.shape == sin.shape == (1, 2, 1, 4)
    torch.testing.assert_close(cos.flatten(), torch.tensor(expected_cos, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(sin.flatten(), torch.tensor(expected_sin, dtype=torch.float64), rtol=0, atol=1e-9)


def test_rope_tables_of_the_model_start_with_two_entries_that_turn_nothing() -> None:
    cos, sin = _block.rope_tables(_block.latent_positions((2, 3, 4)))
    assert cos.shape == sin.shape == (1, 32, 24, 64)
    assert (cos[0, 0, :, :2] == 1).all() and (sin[0, 0, :, :2] == 0).all()
    assert (sin[0, 0, :, 2:5] != 0).all()  # the lowest frequency of each axis


def test_grids() -> None:
    assert _block.smallest_grid(13376) == (16, 22, 38)
    for tokens in (1, 2, 255, 256, 1000, 50_000):
        assert math.prod(_block.smallest_grid(tokens)) >= tokens


def test_draws_are_the_same_each_time() -> None:
    first, second = _block.draw_inputs(3), _block.draw_inputs(3)
    assert all(torch.equal(a, b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True))
    assert first.x.dtype == torch.bfloat16 and first.x.shape == (1, 3, 4096)


def test_attention_a_head_at_a_time_is_torchs() -> None:
    q, k, v = (torch.randn(2, 5, 3 * 8, dtype=torch.float64) for _ in range(3))
    split = [t.unflatten(-1, (3, 8)).transpose(1, 2) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
    torch.testing.assert_close(_exact.attention(q, k, v, heads=3), expected)


def test_rotations_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    quarter = torch.ones(1, 1, 1, 2, dtype=torch.float64)  # a turn by 90 degrees: cos 0, sin 1
    assert _exact.split_rope(x, 0 * quarter, quarter).tolist() == [[[-3, -4, 1, 2]]]
    full = torch.ones(1, 4, dtype=torch.float64)
    assert _exact.interleaved_rope(x, 0 * full, full).tolist() == [[[-2, 1, -4, 3]]]


def test_gate_and_gelu_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    logits = torch.tensor([[[0.0, math.log(3)]]], dtype=torch.float64)  # 2 * sigmoid: 1 and 1.5
    torch.testing.assert_close(_exact.gate_heads(x, logits), torch.tensor([[[1, 2, 4.5, 6]]], dtype=torch.float64))
    one = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(_exact.gelu(one), one * 0.841191990608, rtol=1e-11, atol=0)
    torch.testing.assert_close(_exact.gelu(one, "sigmoid"), one * 0.845795765633, rtol=1e-8, atol=0)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_half_step(dtype: torch.dtype, wide: torch.dtype) -> None:
    values = torch.cat([torch.randn(1000).exp(), torch.tensor([1.0, -1.0, 2**-6, 2**-7, 2**-9, 448.0])]).to(wide)
    assert torch.equal(_exact.half_step(values, dtype).double(), unit_in_last_place(values.double(), dtype) / 2)


def test_half_step_at_zero_is_that_of_the_smallest_values() -> None:
    assert _exact.half_step(torch.zeros(1, dtype=torch.float64), torch.float8_e4m3fn).item() == 2.0**-10


def test_error_and_limit_by_hand() -> None:
    exact = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    # Off by 0.5 of 5. bf16 around 3 and 4 has half steps of 2^-7 and 2^-6.
    error, limit = _exact.error_and_limit(torch.tensor([[3.0, 4.5]], dtype=torch.bfloat16), exact, computing=0.25)
    assert error == pytest.approx(0.1)
    assert limit == pytest.approx(math.hypot(2**-7, 2**-6) / 5 + 0.25)
    # e4m3 with scale 2: 1.5 and 2 have half steps of 2^-4 and 2^-3.
    pair = torch.tensor([[1.5, 2.0]]).to(torch.float8_e4m3fn), torch.tensor([[2.0]])
    error, limit = _exact.error_and_limit(pair, exact)
    assert error == 0
    assert limit == pytest.approx(2 * math.hypot(2**-4, 2**-3) / 5)


def test_error_of_nan_is_above_every_limit() -> None:
    error, limit = _exact.error_and_limit(torch.tensor([[math.nan]]), torch.ones(1, 1, dtype=torch.float64))
    assert not error <= limit


def test_a_comparison_in_chunks_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    output, exact = torch.randn(7, 300).to(torch.float8_e4m3fn), torch.randn(7, 300, dtype=torch.float64)
    pair = output, torch.rand(7, 3) + 0.5
    whole = _exact.error_and_limit(pair, exact)
    monkeypatch.setattr(_exact, "CHUNK", 2 * 300)
    assert _exact.error_and_limit(pair, exact) == pytest.approx(whole)


def test_dequantize_spreads_scales_of_rows_and_of_tiles() -> None:
    q = torch.ones(130, 200).to(torch.float8_e4m3fn)
    rows = torch.arange(260.0).view(130, 2)
    expected = torch.cat([rows[:, :1].expand(130, 128), rows[:, 1:].expand(130, 72)], dim=1)
    assert torch.equal(_exact.dequantize(q, rows), expected.double())
    tiles = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    dequantized = _exact.dequantize(q, tiles)
    assert dequantized[127, 127] == 1 and dequantized[127, 128] == 2
    assert dequantized[128, 127] == 3 and dequantized[129, 199] == 4


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def kernels() -> _compare.Kernels:
    return _compare.Kernels(CPU, _compare.Exact(CPU, torch.float64))


def test_a_right_step_is_within_its_limit_and_a_wrong_one_is_not() -> None:
    x = torch.randn(1, 64, 512).to(torch.bfloat16)
    judged = kernels()
    assert torch.equal(judged(Step("right", "attention", double, double), x), 2 * x)
    judged(Step("rounded", "attention", lambda x: (3 * x.float()).to(x.dtype), lambda x: 3 * x), x)
    judged(Step("wrong", "attention", lambda x: 2.01 * x, double), x)
    judged(Step("nan", "attention", lambda x: x / 0 * 0, double), x)
    judged(Step("second of two", "attention", lambda x: [x, 2 * x], lambda x: [x, x]), x)
    judged(Step("first of two", "attention", lambda x: [2 * x, x], lambda x: [x, x]), x)
    judged(Step("nan, first of two", "attention", lambda x: [x / 0 * 0, x], lambda x: [x, x]), x)
    right, rounded, *wrong = judged.rows
    assert (right.title, right.backend, right.size, right.error) == ("right", "torch", "64×512", 0)
    assert 0.5 * rounded.limit < rounded.error < 0.65 * rounded.limit
    assert [row.error <= row.limit for row in wrong] == [False] * 5


def test_repeats_leave_what_a_step_writes_to_as_one_run_leaves_it() -> None:
    runs = 0

    def increment(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return x.add_(1)

    x = torch.zeros(1, 2, 4)
    out = kernels()(Step("increment", "attention", increment, lambda x: x + 1, writes=0), x)
    assert runs > 1
    assert out is x and (x == 1).all()


def test_a_step_without_code_for_the_device_is_copied_to_and_the_copy_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compare, "place", lambda op, device: (torch.device("meta"), "none"))
    judged = kernels()
    x, pair = torch.zeros(1, 4, 256), (torch.zeros(1, 4, 256), torch.zeros(4, 2))
    moved = judged._on(torch.device("meta"), (x, pair))
    assert moved[0].is_meta and moved[1][0].is_meta and moved[1][1].is_meta
    (row,) = judged.rows
    assert row.is_copy and (row.title, row.size) == ("  to meta", f"{(2 * 4096 + 32) / 1e6:.1f} MB")


def test_place_falls_back_to_the_cpu_where_an_op_has_no_code() -> None:
    assert _compare.place("attention", torch.device("cuda")) == (torch.device("cuda"), "torch")
    assert _compare.place("quantize", CPU) == (CPU, "cpu")
    assert _compare.place("quantize", torch.device("xpu")) == (CPU, "cpu")


def test_memory_that_a_clip_needs_fits_a_large_gpu() -> None:
    assert _compare.bytes_needed(256) < 4e9
    assert 5e9 < _compare.bytes_needed(13376) < 20e9


@pytest.mark.parametrize(("free", "tokens"), [(80e9, 13376), (8e9, 6688), (1e9, 209)])
def test_a_gpu_that_runs_all_steps_takes_a_clip_that_fits(
    free: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compare, "place", lambda op, device: (device, "cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), int(80e9)))
    assert _compare.default_tokens(torch.device("cuda")) == tokens


def test_few_tokens_where_a_step_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compare.default_tokens(CPU) == 256
    monkeypatch.setattr(_compare, "place", lambda op, device: (CPU if op == "quantize" else device, "any"))
    assert _compare.default_tokens(torch.device("cuda")) == 256


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), torch.float64), ((8, 9), torch.float32)])
def test_the_reference_is_float64_where_that_is_fast(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _compare.reference_dtype(torch.device("cuda")) == dtype
    assert _compare.reference_dtype(CPU) == torch.float64
