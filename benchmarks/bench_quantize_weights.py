"""quantize_weights in both ranges against a copy of as many bytes and torch.compile."""

from functools import partial

import torch
from harness import Row, bench, host_row, main, num_sets
from quantizing import BLOCK, randn
from torch import Tensor

from ltx_kernels.blockwise.functional import (
    FP6_SCALE_MAX,
    FP8_SCALE_MAX,
    blockwise_dequantize_weights,
    blockwise_quantize_weights,
)

OP = "quantize_weights"
OUT, IN = 16384, 4096


def quantize_in_torch(w: Tensor, scale_max: float) -> tuple[Tensor, Tensor]:
    tiles = w.float().view(OUT // BLOCK, BLOCK, IN // BLOCK, BLOCK)
    amax = tiles.abs().amax((1, 3), keepdim=True).clamp(min=2.0**-117)
    q = (tiles * (scale_max / amax)).to(torch.float8_e4m3fn).view(OUT, IN)
    return q, (amax / scale_max).view(OUT // BLOCK, IN // BLOCK)


def run() -> list[Row]:
    rows: list[Row] = []
    num_bytes = OUT * IN * 3
    inputs = [randn(OUT, IN) for _ in range(num_sets(num_bytes))]
    for form, scale_max, bound in (("fp8", FP8_SCALE_MAX, 0.04), ("fp6", FP6_SCALE_MAX, 0.06)):
        restored = blockwise_dequantize_weights(*blockwise_quantize_weights(inputs[0], scale_max=scale_max)).double()
        error = ((restored - inputs[0].double()).norm() / inputs[0].double().norm()).item()
        assert error < bound, f"{OP}: relative error {error}"
        compiled = torch.compile(quantize_in_torch)
        contenders = {
            "ltx-kernels": [partial(blockwise_quantize_weights, w, BLOCK, scale_max) for w in inputs],
            "torch.compile": [partial(compiled, w, scale_max) for w in inputs],
            "torch": [partial(quantize_in_torch, w, scale_max) for w in inputs],
        }
        rows += bench(OP, f"{OUT}x{IN}, {form} range", num_bytes, contenders)
    small = randn(128, 4096)
    rows.append(host_row(OP, "128x4096", lambda: blockwise_quantize_weights(small)))
    return rows


if __name__ == "__main__":
    main(run, __doc__)
