"""The quantizing ops under the names that their callers know from Triton: functional's own, on any backend."""

from ltx_kernels.blockwise.functional import (
    blockwise_dequantize_triton,
    blockwise_quantize_adanorm_triton,
    blockwise_quantize_gelu_triton,
    blockwise_quantize_rms_fma_triton,
    blockwise_quantize_triton,
    gated_attention_triton,
    rms_fma_triton,
)

__all__ = [
    "blockwise_dequantize_triton",
    "blockwise_quantize_adanorm_triton",
    "blockwise_quantize_gelu_triton",
    "blockwise_quantize_rms_fma_triton",
    "blockwise_quantize_triton",
    "gated_attention_triton",
    "rms_fma_triton",
]
