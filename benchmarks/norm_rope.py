"""What the benchmarks of the two norm + rotary ops share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from harness import Row, bench, host_row, num_sets
from torch import Tensor

EPS = 1e-6
SIZES = [(32768, 4096, 128), (32768, 2048, 64), (1024, 4096, 128)]  # rows, hidden, head size


@dataclass
class Op:
    name: str
    single: Callable[..., Tensor]
    qk: Callable[..., tuple[Tensor, Tensor]]
    tables: Callable[[int, int, int, bool], tuple[Tensor, Tensor]]  # rows, hidden, head size, half
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]  # in torch, of a normalized x
    half_tables: tuple[bool, ...]


def composed(op: Op, x: Tensor, cos: Tensor, sin: Tensor, weights: Tensor) -> Tensor:
    """The op in torch, in the precision of its inputs' type promotion."""
    v = x.float() if x.dtype != torch.float64 else x
    v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) * weights
    return op.rotate(v, cos, sin)


def verify(op: Op, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    rows = slice(0, 64)
    x, cos, sin, weights = inputs
    few = (x[:, rows], cos[..., rows, :], sin[..., rows, :], weights)
    expected = composed(op, *(t.double() for t in few))
    if out.dtype == torch.float8_e4m3fn:
        expected = expected.clamp(-448, 448)
    error = ((out[:, rows].double() - expected).norm() / expected.norm()).item()
    bound = 0.04 if out.dtype == torch.float8_e4m3fn else 0.003
    assert error < bound, f"{op.name}: relative error {error} against float64"


def run(op: Op) -> list[Row]:
    rows: list[Row] = []
    compiled = torch.compile(lambda *inputs: composed(op, *inputs).bfloat16())
    for num_rows, hidden, head_dim in SIZES:
        for half in op.half_tables:
            table_bytes = 2 * num_rows * (hidden // 2 if half else hidden) * 2
            for out_bytes, out_fp8 in ((2, False), (1, True)):
                num_bytes = num_rows * hidden * (2 + out_bytes) + table_bytes
                inputs = []
                for _ in range(num_sets(num_bytes)):
                    x = torch.randn(1, num_rows, hidden, device="cuda", dtype=torch.bfloat16)
                    weights = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
                    inputs.append((x, *op.tables(num_rows, hidden, head_dim, half), weights))
                verify(op, inputs[0], op.single(*inputs[0], out_fp8))
                contenders = {"ltx-kernels": [partial(op.single, *i, out_fp8) for i in inputs]}
                if not out_fp8:
                    contenders["torch.compile"] = [partial(compiled, *i) for i in inputs]
                case = f"{num_rows}x{hidden} {'fp8' if out_fp8 else 'bf16'} out{', half tables' if half else ''}"
                rows += bench(op.name, case, num_bytes, contenders)
                if not out_fp8:
                    rows += bench_qk(op, num_rows, hidden, table_bytes, inputs, case)
                del inputs, contenders
                torch.cuda.empty_cache()
    x = torch.randn(1, 64, 4096, device="cuda", dtype=torch.bfloat16)
    tables = op.tables(64, 4096, 128, op.half_tables[-1])
    weights = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    rows.append(host_row(op.name, "64x4096", lambda: op.single(x, *tables, weights)))
    rows.append(host_row(f"{op.name}_qk", "64x4096", lambda: op.qk(x, x, *tables, weights, weights)))
    return rows


def bench_qk(
    op: Op, num_rows: int, hidden: int, table_bytes: int, inputs: list[tuple[Tensor, ...]], case: str
) -> list[Row]:
    """q and k in one launch against two calls; both are given the bytes of the one launch."""
    pairs = [(q[0], k[0], *q[1:3], q[3], k[3]) for q, k in zip(inputs, inputs[1:] + inputs[:1], strict=True)]
    for single, both in zip(
        (op.single(*inputs[0]), op.single(inputs[1][0], *inputs[0][1:3], inputs[1][3])), op.qk(*pairs[0]), strict=True
    ):
        assert torch.equal(single, both), f"{op.name}_qk differs from {op.name}"

    def two_calls(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weights: Tensor, k_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        return op.single(q, cos, sin, q_weights), op.single(k, cos, sin, k_weights)

    contenders = {
        "ltx-kernels": [partial(op.qk, *p) for p in pairs],
        "two calls": [partial(two_calls, *p) for p in pairs],
    }
    return bench(f"{op.name}_qk", case, 2 * num_rows * hidden * 4 + table_bytes, contenders)
