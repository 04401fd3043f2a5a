"""adanorm_quantize, with a modulation a batch and a modulation a token, against a copy of as many bytes and
torch.compile."""

from functools import partial

import torch
from harness import Row, host_row, main
from quantizing import SIZES, Inputs, bench_op, quantize_in_torch, randn, scale_bytes
from torch import Tensor

from ltx_kernels.blockwise import blockwise_quantize_adanorm_triton

OP = "adanorm_quantize"


def modulated(x: Tensor, w: None, scale: Tensor, shift: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + scale) + shift


def make_inputs(num_rows: int, hidden: int, modulations: int) -> Inputs:
    return randn(1, num_rows, hidden), None, randn(1, modulations, hidden), randn(1, modulations, hidden)


def exact(x: Tensor, w: None, scale: Tensor, shift: Tensor) -> Tensor:
    return modulated(x[0, :64].double(), w, scale[0, :64].double(), shift[0, :64].double())


def run() -> list[Row]:
    rows: list[Row] = []
    for num_rows, hidden in SIZES:
        for modulations in (1, num_rows):
            rows += bench_op(
                OP,
                f"{num_rows}x{hidden}, modulation a {'batch' if modulations == 1 else 'token'}",
                num_rows * hidden * 3 + scale_bytes(num_rows, hidden) + 2 * modulations * hidden * 2,
                blockwise_quantize_adanorm_triton,
                lambda x, w, scale, shift: quantize_in_torch(modulated(x.float(), w, scale.float(), shift.float())),
                partial(make_inputs, num_rows, hidden, modulations),
                exact,
            )
    inputs = make_inputs(64, 4096, 1)
    rows.append(host_row(OP, "64x4096", lambda: blockwise_quantize_adanorm_triton(*inputs)))
    return rows


if __name__ == "__main__":
    main(run, __doc__)
