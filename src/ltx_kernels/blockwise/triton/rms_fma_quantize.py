"""rms_fma_quantize and rms_fma: csrc/blockwise/rms_fma_quantize/rms_fma_quantize.h."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx_kernels.blockwise.triton.block import (
    chunk_of_row,
    columns_of,
    load,
    reciprocal_rms,
    row_offset,
    store_quantized,
)
from ltx_kernels.blockwise.triton.launch import launch, register, rows_of, whole_row
from ltx_kernels.blockwise.triton.numbers import fma, rounded, to_float32

_EPS = tl.constexpr(1e-6)


@triton.jit
def new_x(x, y, z, column, inside):
    total = fma(load(y + column, inside), load(z + column, inside), load(x + column, inside))
    return rounded(total, x.dtype.element_ty)


@triton.jit(do_not_specialize=["rows"])
def rms_fma_kernel(
    x,
    y,
    z,
    out,
    scales,
    rows,
    hidden,
    sizes,
    x_strides,
    y_strides,
    z_strides,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A program has a row. With one chunk the compiler merges the two new x; no load follows a store to x."""
    row = tl.program_id(0)
    x += row_offset(row, sizes, x_strides)
    y += row_offset(row, sizes, y_strides)
    z += row_offset(row, sizes, z_strides)
    squares = 0.0
    for chunk in tl.range(CHUNKS):
        column = columns_of(chunk_of_row(chunk, BLOCKS))
        v = to_float32(new_x(x, y, z, column, (row < rows) & (column < hidden)))
        squares += tl.sum(v * v)
    rstd = reciprocal_rms(squares, hidden, _EPS)
    for chunk in tl.range(CHUNKS):
        block = chunk_of_row(chunk, BLOCKS)
        column = columns_of(block)
        inside = (row < rows) & (column < hidden)
        total = new_x(x, y, z, column, inside)
        tl.store(x + column, total, inside)
        v = to_float32(total) * rstd
        if scales is None:
            tl.store(out + row.to(tl.int64) * hidden + column, rounded(v, tl.bfloat16), inside)
        else:
            store_quantized(v, out, scales, row, block, rows, hidden)


@register
def rms_fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    out = torch.ops.ltx_kernels.rms_fma_outputs(x, y, z)
    hidden = x.shape[-1]
    rows = x.shape[:-1].numel()
    launch(
        *(rms_fma_kernel, rows, x, y, z, out, None, rows, hidden, *rows_of(x, y, z)),
        **whole_row(hidden),
    )
    return out


@register
def rms_fma_quantize(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    q, scales = torch.ops.ltx_kernels.rms_fma_quantize_outputs(x, y, z)
    rows, hidden = len(scales), x.shape[-1]
    launch(
        *(rms_fma_kernel, scales.stride(1)),
        *(x, y, z, q.view(torch.uint8), scales, rows, hidden, *rows_of(x, y, z)),
        **whole_row(hidden),
    )
    return q, scales
