"""quantize, plain and of both GELUs, against a copy of as many bytes and torch.compile."""

from functools import partial

import torch
from harness import Row, host_row, main
from quantizing import SIZES, Inputs, bench_op, quantize_in_torch, randn, scale_bytes
from torch import Tensor

from ltx_kernels.blockwise import blockwise_quantize

FORMS = (None, "tanh", "sigmoid")


def gelu(x: Tensor, form: str | None) -> Tensor:
    if form == "tanh":
        return x * torch.sigmoid(2 * 0.7978845608 * (x + 0.044715 * x * x * x))
    return x * torch.sigmoid(1.702 * x) if form == "sigmoid" else x


def make_inputs(num_rows: int, hidden: int) -> Inputs:
    return (randn(num_rows, hidden),)


def run() -> list[Row]:
    rows: list[Row] = []
    for form in FORMS:
        op = "quantize" if form is None else f"quantize, gelu {form}"
        ours = partial(blockwise_quantize, gelu=form)
        for num_rows, hidden in SIZES:
            rows += bench_op(
                op,
                f"{num_rows}x{hidden}",
                num_rows * hidden * 3 + scale_bytes(num_rows, hidden),
                ours,
                lambda x, form=form: quantize_in_torch(gelu(x.float(), form)),
                partial(make_inputs, num_rows, hidden),
                lambda x, form=form: gelu(x[:64].double(), form),
            )
        x = randn(64, 4096)
        rows.append(host_row(op, "64x4096", partial(ours, x)))
    return rows


if __name__ == "__main__":
    main(run, __doc__)
