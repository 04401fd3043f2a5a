"""rms_fma_quantize and rms_fma against a copy of as many bytes and torch.compile."""

from functools import partial

import torch
from harness import Row, host_row, main
from quantizing import SIZES, Inputs, bench_op, quantize_in_torch, randn, scale_bytes
from torch import Tensor

from ltx_kernels.blockwise import blockwise_quantize_rms_fma_triton
from ltx_kernels.blockwise.functional import rms_fma_triton


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x.copy_(torch.addcmul(x.float(), y.float(), z.float()))


def make_inputs(num_rows: int, hidden: int) -> Inputs:
    # Small additions: x is added to in every call and must not overflow.
    return randn(1, num_rows, hidden), randn(1, num_rows, hidden), randn(1, 1, hidden) / 64


def exact(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return normalized(torch.addcmul(*(t[0, :64].double() for t in (x, y, z))))


def run() -> list[Row]:
    rows: list[Row] = []
    for num_rows, hidden in SIZES:
        for op, ours, peer, out_bytes in (
            (
                "rms_fma_quantize",
                blockwise_quantize_rms_fma_triton,
                lambda x, y, z: quantize_in_torch(normalized(add(x, y, z).float())),
                num_rows * hidden + scale_bytes(num_rows, hidden),
            ),
            (
                "rms_fma",
                rms_fma_triton,
                lambda x, y, z: normalized(add(x, y, z).float()).bfloat16(),
                num_rows * hidden * 2,
            ),
        ):
            num_bytes = num_rows * hidden * 6 + out_bytes
            inputs = partial(make_inputs, num_rows, hidden)
            rows += bench_op(op, f"{num_rows}x{hidden}", num_bytes, ours, peer, inputs, exact)
    small = make_inputs(64, 4096)
    rows.append(host_row("rms_fma_quantize", "64x4096", lambda: blockwise_quantize_rms_fma_triton(*small)))
    rows.append(host_row("rms_fma", "64x4096", lambda: rms_fma_triton(*small)))
    return rows


if __name__ == "__main__":
    main(run, __doc__)
