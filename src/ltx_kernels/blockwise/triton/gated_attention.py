"""gated_attention: csrc/blockwise/gated_attention/gated_attention.h."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx_kernels.blockwise.triton.block import BLOCK, ROWS, columns_of, load, row_offset, store_quantized, tile, tiles
from ltx_kernels.blockwise.triton.launch import launch, register, rows_of
from ltx_kernels.blockwise.triton.numbers import rounded


@triton.jit(do_not_specialize=["rows"])
def gated_attention_kernel(
    x,
    gate_logits,
    out,
    scales,
    rows,
    hidden,
    sizes,
    x_strides,
    logit_strides,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """GROUP columns, the most that divide a block and a head, have one gate: it is computed once for them."""
    row, block = tile(rows, hidden)
    row_3d = row[:, :, None]
    first = block * BLOCK + tl.arange(0, BLOCK // GROUP)[None, :, None] * GROUP
    logit = gate_logits + row_offset(row_3d, sizes, logit_strides) + first // HEAD_DIM
    gate = 2.0 * tl.sigmoid(load(logit, (row_3d < rows) & (first < hidden)))
    column = first + tl.arange(0, GROUP)[None, None, :]
    v = load(x + row_offset(row_3d, sizes, x_strides) + column, (row_3d < rows) & (column < hidden)) * gate
    v = v.reshape(ROWS, BLOCK)
    if scales is None:
        column = columns_of(block)
        inside = (row < rows) & (column < hidden)
        tl.store(out + row.to(tl.int64) * hidden + column, rounded(v, tl.bfloat16), inside)
    else:
        store_quantized(v, out, scales, row, block, rows, hidden)


@register
def gated_attention(x: Tensor, gate_logits: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    out, scales = torch.ops.ltx_kernels.gated_attention_outputs(x, gate_logits, quantize)
    hidden = x.shape[-1]
    rows = x.shape[:-1].numel()
    head_dim = hidden // gate_logits.shape[-1]
    filled = (out.view(torch.uint8), scales) if quantize else (out, None)
    launch(
        *(gated_attention_kernel, tiles(rows, hidden), x, gate_logits, *filled, rows, hidden, *rows_of(x, gate_logits)),
        HEAD_DIM=head_dim,
        GROUP=math.gcd(head_dim, BLOCK.value),
    )
    return out, scales
