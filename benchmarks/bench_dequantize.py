"""dequantize and dequantize_weights against a copy of as many bytes and torch.compile."""

from functools import partial

from harness import Row, host_row, main
from quantizing import BLOCK, SIZES, Inputs, bench_op, randn, scale_bytes
from torch import Tensor

from ltx_kernels.blockwise import blockwise_dequantize, blockwise_quantize
from ltx_kernels.blockwise.functional import blockwise_dequantize_weights, blockwise_quantize_weights

WEIGHTS = (16384, 4096)


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    return blockwise_dequantize((q, scales))


def scaled(q: Tensor, scales: Tensor) -> Tensor:
    return (q.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


def scaled_weights(q: Tensor, scales: Tensor) -> Tensor:
    return scaled(q, scales.repeat_interleave(BLOCK, 0))


def make_rows(num_rows: int, hidden: int) -> Inputs:
    return blockwise_quantize(randn(num_rows, hidden))


def make_weights() -> Inputs:
    return blockwise_quantize_weights(randn(*WEIGHTS))


def run() -> list[Row]:
    rows: list[Row] = []
    for num_rows, hidden in SIZES:
        rows += bench_op(
            "dequantize",
            f"{num_rows}x{hidden}",
            num_rows * hidden * 3 + scale_bytes(num_rows, hidden),
            dequantize,
            lambda q, scales: scaled(q.float(), scales).bfloat16(),
            partial(make_rows, num_rows, hidden),
            lambda q, scales: scaled(q[:64].double(), scales[:64].double()),
        )
    rows += bench_op(
        "dequantize_weights",
        f"{WEIGHTS[0]}x{WEIGHTS[1]}",
        WEIGHTS[0] * WEIGHTS[1] * 3,
        blockwise_dequantize_weights,
        lambda q, scales: scaled_weights(q.float(), scales).bfloat16(),
        make_weights,
        lambda q, scales: scaled_weights(q[:BLOCK].double(), scales[:1].double()),
    )
    small = make_rows(64, 4096)
    rows.append(host_row("dequantize", "64x4096", lambda: dequantize(*small)))
    weights = blockwise_quantize_weights(randn(128, 4096))
    rows.append(host_row("dequantize_weights", "128x4096", lambda: blockwise_dequantize_weights(*weights)))
    return rows


if __name__ == "__main__":
    main(run, __doc__)
