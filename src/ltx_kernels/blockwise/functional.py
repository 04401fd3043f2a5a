"""Public functions of the fused and the quantizing ops. Shapes: b batch, s tokens, n heads, d head size, h = n * d."""

import torch
from torch import Tensor

from ltx_kernels._backends import call

_ops = torch.ops.ltx_kernels


def rms_norm_rope(
    x: Tensor,
    cos_freqs: Tensor,
    sin_freqs: Tensor,
    weights: Tensor | None = None,
    out_fp8: bool = False,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """RMS norm over the whole row, then interleaved rotary embedding.

    With ``v = x / sqrt(mean(x**2) + eps) * weights``: ``y[2i] = v[2i] * cos[2i] - v[2i+1] * sin[2i]`` and
    ``y[2i+1] = v[2i+1] * cos[2i+1] + v[2i] * sin[2i+1]`` (RoFormer, arXiv 2104.09864).

    Args:
        x: ``[..., h]``, h even; bf16, fp16 or fp32. Any strides with a contiguous last dimension.
        cos_freqs: ``[..., h]`` or ``[..., h/2]`` (one value a pair: half the traffic), broadcastable to x's leading
            sizes; bf16, fp16 or fp32.
        sin_freqs: as cos_freqs.
        weights: ``[h]``, bf16, fp16 or fp32, or None for ones.
        out_fp8: return float8_e4m3fn, without scales: finite values saturate at 448, anything else is NaN.
        eps: finite and > 0.

    Returns:
        ``[..., h]``, contiguous: fp8 if asked for, else bf16 (fp16 if x is). A zero row gives zeros; a row whose sum
        of squares is not finite in fp32 gives NaN everywhere.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return call(_ops.rms_norm_rope.default, x, cos_freqs, sin_freqs, weights, out_fp8, eps)


def rms_norm_split_rope(
    x: Tensor,
    cos_freqs: Tensor,
    sin_freqs: Tensor,
    weights: Tensor | None = None,
    out_fp8: bool = False,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """RMS norm over the whole row, then split-half rotary embedding of each head.

    With ``v = x / sqrt(mean(x**2) + eps) * weights`` and v1, v2 the halves of a head of v: ``y1 = v1 * cos - v2 * sin``
    and ``y2 = v2 * cos + v1 * sin``.

    Args:
        x: ``[b, s, n * d]``, d even; bf16, fp16 or fp32. Any strides with a contiguous last dimension.
        cos_freqs: ``[b or 1, n, s, d/2]``, bf16, fp16 or fp32; n and d are read off it. Any strides with a contiguous
            last dimension, usually a ``[b, s, n, d/2]`` tensor with axes 1 and 2 swapped.
        sin_freqs: as cos_freqs.
        weights: ``[n * d]``, bf16, fp16 or fp32, or None for ones.
        out_fp8: return float8_e4m3fn, without scales: finite values saturate at 448, anything else is NaN.
        eps: finite and > 0.

    Returns:
        ``[b, s, n * d]``, contiguous: fp8 if asked for, else bf16 (fp16 if x is). A zero row gives zeros; a row whose
        sum of squares is not finite in fp32 gives NaN everywhere.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return call(_ops.rms_norm_split_rope.default, x, cos_freqs, sin_freqs, weights, out_fp8, eps)


def rms_norm_rope_qk(
    q: Tensor,
    k: Tensor,
    cos_freqs: Tensor,
    sin_freqs: Tensor,
    q_weights: Tensor | None = None,
    k_weights: Tensor | None = None,
    out_fp8: bool = False,
    *,
    k_cos_freqs: Tensor | None = None,
    k_sin_freqs: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_rope` of q and k in one launch; a table that both share is read once.

    Args:
        q, k: as x there, of one last size. k has q's leading sizes unless it has tables of its own.
        cos_freqs, sin_freqs: q's tables, and k's where it has none of its own.
        q_weights, k_weights: as weights there.
        out_fp8, eps: as there.
        k_cos_freqs, k_sin_freqs: k's own tables.

    Returns:
        (q, k), each as there.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return call(
        _ops.rms_norm_rope_qk.default,
        *(q, k, cos_freqs, sin_freqs, q_weights, k_weights, out_fp8, k_cos_freqs, k_sin_freqs, eps),
    )


def rms_norm_split_rope_qk(
    q: Tensor,
    k: Tensor,
    cos_freqs: Tensor,
    sin_freqs: Tensor,
    q_weights: Tensor | None = None,
    k_weights: Tensor | None = None,
    out_fp8: bool = False,
    *,
    k_cos_freqs: Tensor | None = None,
    k_sin_freqs: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_split_rope` of q and k in one launch; a table that both share is read once.

    Args:
        q, k: as x there, of one last size. k has q's leading sizes unless it has tables of its own.
        cos_freqs, sin_freqs: q's tables, and k's where it has none of its own.
        q_weights, k_weights: as weights there.
        out_fp8, eps: as there.
        k_cos_freqs, k_sin_freqs: k's own tables.

    Returns:
        (q, k), each as there.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return call(
        _ops.rms_norm_split_rope_qk.default,
        *(q, k, cos_freqs, sin_freqs, q_weights, k_weights, out_fp8, k_cos_freqs, k_sin_freqs, eps),
    )


def fp6_pack_tensor(x: Tensor) -> Tensor:
    """The 6-bit codes of e4m3 values, four of them in three bytes.

    A code is an e4m3 byte without its two top exponent bits: the E2M3 values up to 0.1171875. Four codes c0..c3 become
    the bytes ``c0 << 2 | c1 >> 4``, ``(c1 & 15) << 4 | c2 >> 2`` and ``(c2 & 3) << 6 | c3``.

    Args:
        x: ``[m, n]``, n % 4 == 0; fp8, or its bytes as uint8. Any row stride with a contiguous last dimension.

    Returns:
        uint8 ``[m, n * 3/4]``. What does not fit, NaN too, becomes the largest value of its sign.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return call(_ops.fp6_pack.default, x)


def fp6_unpack_tensor(x: Tensor, original_n: int) -> Tensor:
    """The e4m3 bytes of packed 6-bit codes: what :func:`fp6_pack_tensor` packed, if it all fitted.

    Args:
        x: uint8 ``[m, original_n * 3/4]``. Any row stride with a contiguous last dimension.
        original_n: values in a row, 4/3 of x's last size.

    Returns:
        uint8 ``[m, original_n]``, to be viewed as fp8.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return call(_ops.fp6_unpack.default, x, original_n)
