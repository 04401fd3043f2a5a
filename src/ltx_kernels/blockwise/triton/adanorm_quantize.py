"""adanorm_quantize: csrc/blockwise/adanorm_quantize/adanorm_quantize.h."""

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

_EPS = tl.constexpr(1e-5)


@triton.jit(do_not_specialize=["rows"])
def adanorm_quantize_kernel(
    x,
    w,
    norm_scale,
    norm_shift,
    q,
    scales,
    rows,
    hidden,
    sizes,
    x_strides,
    scale_strides,
    shift_strides,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A program has a row. With one chunk the compiler merges both loads of x."""
    row = tl.program_id(0)
    x += row_offset(row, sizes, x_strides)
    norm_scale += row_offset(row, sizes, scale_strides)
    norm_shift += row_offset(row, sizes, shift_strides)
    squares = 0.0
    for chunk in tl.range(CHUNKS):
        column = columns_of(chunk_of_row(chunk, BLOCKS))
        v = load(x + column, (row < rows) & (column < hidden))
        squares += tl.sum(v * v)
    rstd = reciprocal_rms(squares, hidden, _EPS)
    for chunk in tl.range(CHUNKS):
        block = chunk_of_row(chunk, BLOCKS)
        column = columns_of(block)
        inside = (row < rows) & (column < hidden)
        v = load(x + column, inside) * rstd
        if w is not None:
            v *= load(w + column, inside)
        v = v * (1.0 + load(norm_scale + column, inside)) + load(norm_shift + column, inside)
        store_quantized(v, q, scales, row, block, rows, hidden)


@register
def adanorm_quantize(x: Tensor, w: Tensor | None, norm_scale: Tensor, norm_shift: Tensor) -> tuple[Tensor, Tensor]:
    q, scales = torch.ops.ltx_kernels.adanorm_quantize_outputs(x, w, norm_scale, norm_shift)
    rows, hidden = len(scales), x.shape[-1]
    launch(
        *(adanorm_quantize_kernel, scales.stride(1)),
        *(x, w, norm_scale, norm_shift, q.view(torch.uint8), scales, rows, hidden, *rows_of(x, norm_scale, norm_shift)),
        **whole_row(hidden),
    )
    return q, scales
