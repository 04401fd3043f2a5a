"""dequantize and dequantize_weights: csrc/blockwise/dequantize/dequantize.h."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx_kernels.blockwise.triton.block import columns_of, load, row_offset, tile, tiles
from ltx_kernels.blockwise.triton.launch import launch, register, rows_of
from ltx_kernels.blockwise.triton.numbers import decode_e4m3, rounded


@triton.jit(do_not_specialize=["rows"])
def dequantize_kernel(
    q,
    scales,
    out,
    rows,
    hidden,
    q_sizes,
    q_strides,
    scale_sizes,
    scale_strides,
    block_stride,
    ROWS_A_SCALE: tl.constexpr,
):
    row, block = tile(rows, hidden)
    column = columns_of(block)
    inside = (row < rows) & (column < hidden)
    values = decode_e4m3(tl.load(q + row_offset(row, q_sizes, q_strides) + column, inside, other=0))
    scale_offset = row_offset(row // ROWS_A_SCALE, scale_sizes, scale_strides) + block * block_stride
    values *= load(scales + scale_offset, row < rows)
    tl.store(out + row.to(tl.int64) * hidden + column, rounded(values, tl.bfloat16), inside)


def _fill(out: Tensor, q: Tensor, scales: Tensor, rows_a_scale: int) -> Tensor:
    hidden = q.shape[-1]
    rows = q.shape[:-1].numel()
    launch(
        *(dequantize_kernel, tiles(rows, hidden), q.view(torch.uint8), scales, out, rows, hidden),
        *(*rows_of(q), *rows_of(scales), scales.stride(-1)),
        ROWS_A_SCALE=rows_a_scale,
    )
    return out


@register
def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    return _fill(torch.ops.ltx_kernels.dequantize_outputs(q, scales), q, scales, 1)


@register
def dequantize_weights(q: Tensor, scales: Tensor) -> Tensor:
    return _fill(torch.ops.ltx_kernels.dequantize_weights_outputs(q, scales), q, scales, 128)
