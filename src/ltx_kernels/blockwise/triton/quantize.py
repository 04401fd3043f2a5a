"""quantize: csrc/blockwise/quantize/quantize.h."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx_kernels.blockwise.triton.block import columns_of, load, row_offset, store_quantized, tile, tiles
from ltx_kernels.blockwise.triton.launch import launch, register, rows_of

_GELU_TANH, _GELU_SIGMOID = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(x, q, scales, rows, hidden, sizes, x_strides, GELU: tl.constexpr):
    row, block = tile(rows, hidden)
    column = columns_of(block)
    v = load(x + row_offset(row, sizes, x_strides) + column, (row < rows) & (column < hidden))
    if GELU == _GELU_TANH:
        u = 0.7978845608 * (v + 0.044715 * v * v * v)
        v = v * tl.sigmoid(2.0 * u)
    elif GELU == _GELU_SIGMOID:
        v = v * tl.sigmoid(1.702 * v)
    store_quantized(v, q, scales, row, block, rows, hidden)


@register
def quantize(x: Tensor, gelu: int | None) -> tuple[Tensor, Tensor]:
    q, scales = torch.ops.ltx_kernels.quantize_outputs(x, gelu)
    rows, hidden = len(scales), x.shape[-1]
    launch(
        *(quantize_kernel, tiles(rows, hidden), x, q.view(torch.uint8), scales, rows, hidden, *rows_of(x)),
        GELU=gelu,
    )
    return q, scales
