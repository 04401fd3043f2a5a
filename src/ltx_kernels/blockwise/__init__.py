"""Ops and layers for 8 and 6 bits with blockwise scales."""

from ltx_kernels._backends import get_backend, set_backend
from ltx_kernels.blockwise.functional import (
    blockwise_dequantize,
    blockwise_quantize,
    blockwise_quantize_adanorm_triton,
    blockwise_quantize_rms_fma_triton,
    fp6_blockwise_quantize_weights_torch,
    fp6_pack_tensor,
    fp6_unpack_tensor,
    fp8_blockwise_quantize_weights_torch,
    gated_attention_triton,
    rms_norm_rope,
    rms_norm_rope_qk,
    rms_norm_split_rope,
    rms_norm_split_rope_qk,
)
from ltx_kernels.blockwise.linear import (
    BlockwiseFP6Linear,
    BlockwiseFP8Linear,
    blockwise_fp8_gemm,
    gemm_config,
    quantize_model,
)

__all__ = [
    "BlockwiseFP6Linear",
    "BlockwiseFP8Linear",
    "blockwise_dequantize",
    "blockwise_fp8_gemm",
    "blockwise_quantize",
    "blockwise_quantize_adanorm_triton",
    "blockwise_quantize_rms_fma_triton",
    "fp6_blockwise_quantize_weights_torch",
    "fp6_pack_tensor",
    "fp6_unpack_tensor",
    "fp8_blockwise_quantize_weights_torch",
    "gated_attention_triton",
    "gemm_config",
    "get_backend",
    "quantize_model",
    "rms_norm_rope",
    "rms_norm_rope_qk",
    "rms_norm_split_rope",
    "rms_norm_split_rope_qk",
    "set_backend",
]
