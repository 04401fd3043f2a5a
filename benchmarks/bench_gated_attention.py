"""gated_attention, quantized and not, against a copy of as many bytes and torch.compile."""

from functools import partial

import torch
from harness import Row, host_row, main
from quantizing import SIZES, Inputs, bench_op, quantize_in_torch, randn, scale_bytes
from torch import Tensor

from ltx_kernels.blockwise import gated_attention_triton

OP = "gated_attention"
HEADS = 32


def gated(x: Tensor, logits: Tensor) -> Tensor:
    return (x.unflatten(-1, (HEADS, -1)) * (2 * torch.sigmoid(logits))[..., None]).flatten(-2)


def quantized(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    return gated_attention_triton(x, logits)


def not_quantized(x: Tensor, logits: Tensor) -> Tensor:
    return gated_attention_triton(x, logits, quantize=False)[0]


def make_inputs(num_rows: int, hidden: int) -> Inputs:
    return randn(1, num_rows, hidden), randn(1, num_rows, HEADS)


def exact(x: Tensor, logits: Tensor) -> Tensor:
    return gated(x[0, :64].double(), logits[0, :64].double())


def run() -> list[Row]:
    rows: list[Row] = []
    for num_rows, hidden in SIZES:
        for form, ours, peer, out_bytes in (
            (
                "",
                quantized,
                lambda x, logits: quantize_in_torch(gated(x.float(), logits.float())),
                num_rows * hidden + scale_bytes(num_rows, hidden),
            ),
            (
                ", bf16 out",
                not_quantized,
                lambda x, logits: gated(x.float(), logits.float()).bfloat16(),
                num_rows * hidden * 2,
            ),
        ):
            num_bytes = num_rows * (hidden + HEADS) * 2 + out_bytes
            inputs = partial(make_inputs, num_rows, hidden)
            rows += bench_op(OP, f"{num_rows}x{hidden}{form}", num_bytes, ours, peer, inputs, exact)
    small = make_inputs(64, 4096)
    rows.append(host_row(OP, "64x4096", lambda: quantized(*small)))
    rows.append(host_row(OP, "64x4096, bf16 out", lambda: not_quantized(*small)))
    return rows


if __name__ == "__main__":
    main(run, __doc__)
