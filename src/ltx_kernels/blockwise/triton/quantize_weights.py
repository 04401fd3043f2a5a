"""quantize_weights: csrc/blockwise/quantize_weights/quantize_weights.h."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltx_kernels.blockwise.triton.block import BLOCK, load, quantize_block
from ltx_kernels.blockwise.triton.launch import launch, register
from ltx_kernels.blockwise.triton.numbers import magnitude_bits


@triton.jit(do_not_specialize=["scale_max"])
def quantize_weights_kernel(w, q, scales, out_size, in_size, w_stride, scale_max):
    """A program has a tile."""
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(in_size, BLOCK)
    row = (tile // tiles_across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = (tile % tiles_across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < out_size) & (column < in_size)
    v = load(w + row * w_stride + column, inside)
    values, scale = quantize_block(v, tl.max(magnitude_bits(v)), scale_max)
    tl.store(q + row * in_size + column, values, inside)
    tl.store(scales + tile, scale)


@register
def quantize_weights(w: Tensor, block_size: int, scale_max: float) -> tuple[Tensor, Tensor]:
    q, scales = torch.ops.ltx_kernels.quantize_weights_outputs(w, block_size, scale_max)
    launch(
        *(quantize_weights_kernel, scales.numel(), w, q.view(torch.uint8), scales, *w.shape, w.stride(0), scale_max),
        num_warps=8,
    )
    return q, scales
