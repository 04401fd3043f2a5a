"""What the benchmarks of the quantizing ops share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from harness import Row, bench, num_sets
from torch import Tensor

from ltx_kernels.blockwise import blockwise_dequantize

SIZES = [(32768, 4096), (32768, 2048), (1024, 4096)]  # rows, hidden
BLOCK = 128

Inputs = tuple[Any, ...]


def quantize_in_torch(v: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of v, whose last size is a multiple of 128, in torch: what torch.compile is given."""
    blocks = v.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-117)
    q = (blocks * (448.0 / amax)).to(torch.float8_e4m3fn).flatten(-2)
    return q, (amax / 448.0).squeeze(-1)


def scale_bytes(rows: int, hidden: int) -> int:
    return rows * hidden // BLOCK * 4


def verify(op: str, result: Tensor | tuple[Tensor, Tensor], expected: Tensor) -> None:
    """Relative error against float64 on the rows of `expected`, the first ones of the result."""
    actual = blockwise_dequantize(result) if isinstance(result, tuple) else result
    actual = actual.flatten(0, -2)[: len(expected)].double()
    error = ((actual - expected).norm() / expected.norm()).item()
    bound = 0.04 if isinstance(result, tuple) else 0.003
    assert error < bound, f"{op}: relative error {error} against float64"


def bench_op(
    op: str,
    case: str,
    num_bytes: float,
    ours: Callable[..., Any],
    peer: Callable[..., Any] | None,
    make_inputs: Callable[[], Inputs],
    exact: Callable[..., Tensor],
) -> list[Row]:
    """Verifies 64 rows of the first inputs against `exact`, a function of the inputs in float64; then times."""
    inputs: Sequence[Inputs] = [make_inputs() for _ in range(num_sets(num_bytes))]
    first = [t.clone() if isinstance(t, Tensor) else t for t in inputs[0]]  # an op may write to its inputs
    expected = exact(*first)
    verify(op, ours(*first), expected)
    contenders = {"ltx-kernels": [partial(ours, *i) for i in inputs]}
    if peer is not None:
        compiled = torch.compile(peer)
        contenders["torch.compile"] = [partial(compiled, *i) for i in inputs]
    rows = bench(op, case, num_bytes, contenders)
    del inputs, contenders
    torch.cuda.empty_cache()
    return rows


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
