"""Ops and layers for 8 and 6 bits with blockwise scales."""

from ltx_kernels._backends import get_backend, set_backend
from ltx_kernels.blockwise.functional import (
    fp6_pack_tensor,
    fp6_unpack_tensor,
    rms_norm_rope,
    rms_norm_rope_qk,
    rms_norm_split_rope,
    rms_norm_split_rope_qk,
)

__all__ = [
    "fp6_pack_tensor",
    "fp6_unpack_tensor",
    "get_backend",
    "rms_norm_rope",
    "rms_norm_rope_qk",
    "rms_norm_split_rope",
    "rms_norm_split_rope_qk",
    "set_backend",
]
