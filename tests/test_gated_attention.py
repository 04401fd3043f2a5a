"""gated_attention, on every device, against float64."""

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
from cases.norm_rope import lay_out
from cases.quantize import CASES, EXTREMES, INF, NAN, Case, extreme_block
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_quantized, assert_rounded_once
from torch import Tensor

from ltx_kernels._backends import serving
from ltx_kernels.blockwise import gated_attention_triton

OP = "gated_attention"
op = torch.ops.ltx_kernels.gated_attention.default


def exact(x: Tensor, gate_logits: Tensor) -> Tensor:
    x, gates = x.detach().cpu().double(), 2 * gate_logits.detach().cpu().double().sigmoid()
    return x * gates.repeat_interleave(x.shape[-1] // gates.shape[-1], dim=-1)


def assert_gates(x: Tensor, gate_logits: Tensor) -> None:
    expected = exact(x, gate_logits)
    assert_quantized(gated_attention_triton(x, gate_logits), expected, x.abs())
    out, scales = gated_attention_triton(x, gate_logits, quantize=False)
    assert scales is None and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert_rounded_once(out, expected, x.cpu().double().abs())


@pytest.mark.parametrize("logit_layout", ["contiguous", "chunk", "swapped", "offset"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, logit_layout: str, device: str) -> None:
    logits = torch.randn(case.batch, case.tokens, case.heads) * 3
    assert_gates(case.make_x(device), lay_out(logits.to(case.other_dtype).to(device), logit_layout))


def test_by_hand(device: str) -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], device=device)
    logits = torch.tensor([[[0.0, INF]]], device=device)  # gates 1 and 2
    out, scales = gated_attention_triton(x, logits, False)
    assert out.tolist() == [[[1.0, 2.0, 6.0, 8.0]]] and scales is None
    q, scales = gated_attention_triton(x, logits)
    assert q.float().tolist() == [[[56.0, 112.0, 320.0, 448.0]]]  # 336 lies between 320 and 352: a tie, to even
    assert scales.tolist() == [[(torch.tensor(8.0) / torch.tensor(448.0)).item()]]


def test_logits_over_their_whole_range(device: str) -> None:
    logits = torch.cat([torch.linspace(-200, 200, 64), torch.tensor([-1e30, 1e30, torch.inf, -torch.inf])]).to(device)
    assert_gates(torch.randn(3, 68 * 32, device=device), logits.expand(3, -1))


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values(name: str, device: str) -> None:
    x = torch.randn(2, 3, 384)
    x[1, 1, 128:256] = extreme_block(name)
    logits = torch.randn(2, 3, 12).clamp(max=0)  # a gate above 1 would overflow
    pair = gated_attention_triton(x.to(device), logits.to(device))
    assert_quantized(pair, exact(x, logits), x.abs())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_logit_poisons_the_blocks_of_its_head_alone(bad: float, device: str) -> None:
    x = torch.randn(2, 384, device=device)
    logits = torch.randn(2, 4, device=device)  # heads of 96: head 1 lies in blocks 0 and 1
    logits[1, 1] = bad
    x[1, 100] = INF  # times a gate of NaN, 2 or 0
    _, scales = gated_attention_triton(x, logits)
    assert scales.isnan().tolist() == [[False] * 3, [True, bad not in (INF, -INF), False]]


@pytest.mark.parametrize("shape", [(256,), (7, 200), (2, 3, 2, 132), (0, 64), (5, 0)])
def test_any_rank(shape: tuple[int, ...], device: str) -> None:
    assert_gates(torch.randn(shape, device=device), torch.randn(*shape[:-1], 4, device=device))


@settings(deadline=None, max_examples=60)
@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    heads=st.integers(1, 9),
    head_dim=st.integers(1, 70),
    gap=st.integers(0, 20),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_stride_and_value(
    leading: list[int], heads: int, head_dim: int, gap: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(*leading, heads * head_dim + gap) * 10.0**exponent).to(dtype)[..., gap:]
    assert_gates(x, torch.randn(*leading, heads + gap)[..., gap:] * 5)


@pytest.mark.parametrize("quantize", [True, False])
def test_opcheck(quantize: bool, device: str) -> None:
    for shape, heads in [((2, 3, 200), 4), ((5, 128), 2), ((0, 64), 1)]:
        x, logits = torch.randn(shape, device=device), torch.randn(*shape[:-1], heads, device=device)
        torch.library.opcheck(serving(op, torch.device(device)), (x, logits, quantize))


@pytest.mark.parametrize("quantize", [True, False])
def test_behaviour_and_graphs(quantize: bool, device: str) -> None:
    def inputs(batch: int, tokens: int, hidden: int) -> list[Tensor | bool]:
        tensors = [torch.randn(batch, tokens, size, device=device) for size in (hidden, 4)]
        return [*tensors, quantize]

    assert_inputs_untouched(gated_attention_triton, inputs(2, 5, 200))
    assert_repeatable(gated_attention_triton, inputs(2, 33, 200))
    assert_no_backward(gated_attention_triton, inputs(2, 5, 200), OP)
    assert_compiles(lambda *args: gated_attention_triton(*args)[: 1 + quantize], inputs(2, 5, 256), inputs(3, 7, 200))
    if device == "cuda":
        assert_captures(gated_attention_triton, inputs(2, 5, 200), inputs(2, 5, 200))
        assert_uses_current_stream(gated_attention_triton, inputs(2, 5, 200))


@pytest.mark.parametrize(
    ("x", "logits", "message"),
    [
        (torch.zeros(2, 5, 8).int(), torch.zeros(2, 5, 4), "x must be bfloat16, float16 or float32, got int32"),
        (torch.zeros(2, 8), torch.zeros(2, 4).int(), "gate_logits must be bfloat16, float16 or float32, got int32"),
        (torch.zeros(()), torch.zeros(4), "x must have 1 to 8 dimensions, got []"),
        (
            torch.zeros(2, 5, 8),
            torch.zeros(2, 1, 4),
            "gate_logits must have the leading sizes of x [2, 5, 8], got [2, 1, 4]",
        ),
        (
            torch.zeros(2, 5, 8),
            torch.zeros(10, 4),
            "gate_logits must have the leading sizes of x [2, 5, 8], got [10, 4]",
        ),
        (torch.zeros(2, 8), torch.zeros(2, 3), "gate_logits must have a last size that divides x's, 8, got 3"),
        (torch.zeros(2, 8), torch.zeros(2, 0), "gate_logits must have a last size that divides x's, 8, got 0"),
        (torch.zeros(8, 2).t(), torch.zeros(2, 4), "x must have a contiguous last dimension, got stride 2"),
        (torch.zeros(2, 8), torch.zeros(4, 2).t(), "gate_logits must have a contiguous last dimension, got stride 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(x: Tensor, logits: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'gated_attention: {message}')}$"):
        gated_attention_triton(x, logits)
