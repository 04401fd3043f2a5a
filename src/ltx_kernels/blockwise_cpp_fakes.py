"""Shapes of the ops of blockwise_cpp, which imports this module when it is imported itself."""

import math

import torch
from torch import Tensor

from ltx_kernels._fakes import register_fake

BLOCK_SIZE = 128


def _blocks(size: int) -> int:
    return (size + BLOCK_SIZE - 1) // BLOCK_SIZE


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 of x's shape, and scales a row and block: column-major, the row count padded to a multiple of 4."""
    rows = math.prod(x.shape[:-1])
    padded_rows = (rows + 3) // 4 * 4
    scales = x.new_empty_strided((rows, _blocks(x.shape[-1])), (1, padded_rows), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


@register_fake("ltx_kernels::quantize")
def _quantize(x: Tensor, gelu: int | None) -> tuple[Tensor, Tensor]:
    return _quantized(x)


@register_fake("ltx_kernels::quantize_weights")
def _quantize_weights(w: Tensor, block_size: int, scale_max: float) -> tuple[Tensor, Tensor]:
    scales = w.new_empty((_blocks(w.shape[0]), _blocks(w.shape[1])), dtype=torch.float32)
    return w.new_empty(w.shape, dtype=torch.float8_e4m3fn), scales


@register_fake("ltx_kernels::dequantize")
@register_fake("ltx_kernels::dequantize_weights")
def _dequantize(q: Tensor, scales: Tensor) -> Tensor:
    return q.new_empty(q.shape, dtype=torch.bfloat16)


@register_fake("ltx_kernels::adanorm_quantize")
def _adanorm_quantize(x: Tensor, w: Tensor | None, norm_scale: Tensor, norm_shift: Tensor) -> tuple[Tensor, Tensor]:
    return _quantized(x)


@register_fake("ltx_kernels::rms_fma_quantize")
def _rms_fma_quantize(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return _quantized(x)


@register_fake("ltx_kernels::rms_fma")
def _rms_fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


@register_fake("ltx_kernels::gated_attention")
def _gated_attention(x: Tensor, gate_logits: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    if quantize:
        return _quantized(x)
    return x.new_empty(x.shape, dtype=torch.bfloat16), x.new_empty((0,), dtype=torch.float32)


@register_fake("ltx_kernels::fp8_gemm")
def _fp8_gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    use_fast_accum: bool,
    out_dtype: torch.dtype,
    config: list[int] | None = None,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
