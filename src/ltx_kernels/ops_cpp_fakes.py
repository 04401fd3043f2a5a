"""Shapes of the ops of ops_cpp, which imports this module when it is imported itself."""

import torch
from torch import Tensor

from ltx_kernels._fakes import register_fake


def _rotated(x: Tensor, out_fp8: bool) -> Tensor:
    dtype = torch.float16 if x.dtype == torch.float16 else torch.bfloat16
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn if out_fp8 else dtype)


def _norm_rope(
    x: Tensor, cos_freqs: Tensor, sin_freqs: Tensor, weights: Tensor | None, out_fp8: bool, eps: float
) -> Tensor:
    return _rotated(x, out_fp8)


def _norm_rope_qk(
    q: Tensor,
    k: Tensor,
    cos_freqs: Tensor,
    sin_freqs: Tensor,
    q_weights: Tensor | None,
    k_weights: Tensor | None,
    out_fp8: bool,
    k_cos_freqs: Tensor | None,
    k_sin_freqs: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return _rotated(q, out_fp8), _rotated(k, out_fp8)


@register_fake("ltx_kernels::fp6_pack")
def _fp6_pack(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 4 * 3), dtype=torch.uint8)


@register_fake("ltx_kernels::fp6_unpack")
def _fp6_unpack(x: Tensor, original_n: int) -> Tensor:
    return x.new_empty((x.shape[0], original_n))


for _op in ("rms_norm_rope", "rms_norm_split_rope"):
    register_fake(f"ltx_kernels::{_op}", _norm_rope)
    register_fake(f"ltx_kernels::{_op}_qk", _norm_rope_qk)
