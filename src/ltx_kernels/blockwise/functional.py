"""Public functions of the fused and the quantizing ops. Shapes: b batch, s tokens, n heads, d head size, h = n * d."""

import torch
from torch import Tensor

from ltx_kernels._backends import call_in_place, route

FP8_SCALE_MAX = 448.0
FP6_SCALE_MAX = 0.1172

_ops = torch.ops.ltx_kernels
_GELU_FORMS = {None: None, "tanh": 1, "sigmoid": 2}


def pair_of(op: str, argument: str, value: object) -> tuple[Tensor, Tensor]:
    """The two entries of an argument that must be a pair."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{op}: {argument} must be a pair (q, scales), got {type(value).__name__}")
    if len(value) != 2:
        raise TypeError(f"{op}: {argument} must be a pair (q, scales), got {len(value)} entries")
    return value[0], value[1]


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
    return route(_ops.rms_norm_rope.default)(x, cos_freqs, sin_freqs, weights, out_fp8, eps)


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
    return route(_ops.rms_norm_split_rope.default)(x, cos_freqs, sin_freqs, weights, out_fp8, eps)


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
        k_cos_freqs, k_sin_freqs: k's own tables, both or none.

    Returns:
        (q, k), each as there.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return route(_ops.rms_norm_rope_qk.default)(
        q, k, cos_freqs, sin_freqs, q_weights, k_weights, out_fp8, k_cos_freqs, k_sin_freqs, eps
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
        k_cos_freqs, k_sin_freqs: k's own tables, both or none.

    Returns:
        (q, k), each as there.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return route(_ops.rms_norm_split_rope_qk.default)(
        q, k, cos_freqs, sin_freqs, q_weights, k_weights, out_fp8, k_cos_freqs, k_sin_freqs, eps
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
    return route(_ops.fp6_pack.default)(x)


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
    return route(_ops.fp6_unpack.default)(x, original_n)


def blockwise_quantize(x: Tensor, *, gelu: str | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 values and one scale for each row and 128 columns, optionally of GELU(x).

    ``amax_c = max(amax, 2**-117)``, ``q = e4m3(x * (448 / amax_c))``, ``scale = amax_c / 448``, where amax is the
    largest magnitude of the block: of 128 columns of a row, the last block may be narrower.

    Args:
        x: ``[..., h]``; bf16, fp16 or fp32. Any strides with a contiguous last dimension.
        gelu: None; "tanh" for ``x * sigmoid(2u)`` with ``u = 0.7978845608 * (x + 0.044715 * x**3)``; "sigmoid" for
            ``x * sigmoid(1.702 * x)`` (arXiv 1606.08415).

    Returns:
        (q, scales). q: ``[..., h]`` fp8, contiguous. scales: ``[rows, ceil(h/128)]`` fp32, column-major with the row
        count padded to a multiple of 4, padding 0: what the matrix product reads. A block of zeros dequantizes to
        zeros. A block with a NaN or an Inf has q 0 and scale NaN, so it dequantizes to NaN.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    if not isinstance(gelu, (str, type(None))) or gelu not in _GELU_FORMS:
        raise RuntimeError(f"quantize: gelu must be None, 'tanh' or 'sigmoid', got {gelu!r}")
    return route(_ops.quantize.default)(x, _GELU_FORMS[gelu])


def blockwise_quantize_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`blockwise_quantize` without GELU."""
    return blockwise_quantize(x)


def blockwise_quantize_gelu_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`blockwise_quantize` of ``x * sigmoid(1.702 * x)``."""
    return blockwise_quantize(x, gelu="sigmoid")


def blockwise_dequantize(pair: tuple[Tensor, Tensor]) -> Tensor:
    """bf16 values of e4m3 values with one scale for each row and 128 columns.

    ``out[row, column] = bf16(q[row, column] * scales[row, column // 128])``, the product rounded to fp32 first.

    Args:
        pair: (q, scales). q: ``[..., h]`` fp8, any strides with a contiguous last dimension. scales: exactly one a row
            and block, of shape ``[rows, ceil(h/128)]`` or of q's leading sizes and ``ceil(h/128)``; bf16, fp16 or fp32,
            any strides. Scales of weight tiles serve too after ``scales.repeat_interleave(128, 0)`` where the number of
            rows is a multiple of 128; :func:`blockwise_dequantize_weights` takes them as they are.

    Returns:
        ``[..., h]`` bf16, contiguous.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return route(_ops.dequantize.default)(*pair_of("dequantize", "pair", pair))


def blockwise_dequantize_triton(q: Tensor, scales: Tensor) -> Tensor:
    """:func:`blockwise_dequantize` with the pair as two arguments."""
    return blockwise_dequantize((q, scales))


def blockwise_dequantize_weights(q: Tensor, scales: Tensor) -> Tensor:
    """bf16 values of e4m3 weights with one scale for each tile of 128 x 128.

    Args:
        q: ``[out, in]`` fp8, any strides with a contiguous last dimension.
        scales: ``[ceil(out/128), ceil(in/128)]``; bf16, fp16 or fp32, any strides.

    Returns:
        ``[out, in]`` bf16, contiguous: ``bf16(q * scale)``, the product rounded to fp32 first.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return route(_ops.dequantize_weights.default)(q, scales)


def blockwise_quantize_weights(
    w: Tensor, block_size: int = 128, scale_max: float = FP8_SCALE_MAX
) -> tuple[Tensor, Tensor]:
    """e4m3 values and one scale for each tile of 128 x 128 weights.

    The rule of :func:`blockwise_quantize` with scale_max in place of 448.

    Args:
        w: ``[out, in]``; bf16, fp16 or fp32. Any strides with a contiguous last dimension.
        block_size: 128.
        scale_max: the value that a tile's largest magnitude becomes; > 0 and at most 448. ``FP6_SCALE_MAX`` keeps all
            values in the range that :func:`fp6_pack_tensor` packs exactly.

    Returns:
        (q, scales), both contiguous. q: ``[out, in]`` fp8, in either range. scales: ``[ceil(out/128), ceil(in/128)]``
        fp32. A tile of zeros dequantizes to zeros; one with a NaN or an Inf has q 0 and scale NaN.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    return route(_ops.quantize_weights.default)(w, block_size, scale_max)


def fp8_blockwise_quantize_weights_torch(w: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """:func:`blockwise_quantize_weights` in the range of 8 bits."""
    return blockwise_quantize_weights(w, block_size, FP8_SCALE_MAX)


def fp6_blockwise_quantize_weights_torch(w: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """:func:`blockwise_quantize_weights` in the range of 6 bits. q is fp8 here too: fp6_pack_tensor packs it."""
    return blockwise_quantize_weights(w, block_size, FP6_SCALE_MAX)


def blockwise_quantize_adanorm_triton(
    x: Tensor,
    w: Tensor | None,
    norm_scale: Tensor,
    norm_shift: Tensor,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    hd_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm over the row, modulated, then quantized.

    ``v = ((x * rstd) * w) * (1 + norm_scale) + norm_shift`` with ``rstd = 1 / sqrt(mean(x**2) + 1e-5)``
    (arXiv 1910.07467, arXiv 2212.09748), quantized as :func:`blockwise_quantize` does.

    Args:
        x: ``[b, s, h]`` (any rank from 1); bf16, fp16 or fp32, as are the next three, each of its own dtype. Any
            strides with a contiguous last dimension.
        w: ``[h]``, or None for ones.
        norm_scale: ``[b, 1 or s, h]``, or anything that broadcasts to x's leading sizes.
        norm_shift: as norm_scale.
        out_dtype: torch.float8_e4m3fn.
        hd_scale: None or 1.0.

    Returns:
        (q, scales) as :func:`blockwise_quantize`. A zero row is norm_shift. A row whose sum of squares is not finite in
        fp32 has q 0 and scales NaN.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    if out_dtype is not torch.float8_e4m3fn:
        raise RuntimeError(f"adanorm_quantize: out_dtype must be torch.float8_e4m3fn, got {out_dtype}")
    if hd_scale is not None and not (isinstance(hd_scale, (float, int)) and hd_scale == 1.0):
        raise RuntimeError(f"adanorm_quantize: hd_scale must be None or 1.0, got {hd_scale}")
    return route(_ops.adanorm_quantize.default)(x, w, norm_scale, norm_shift)


def blockwise_quantize_rms_fma_triton(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Add a gated residual to x in place, then quantize the RMS norm of the sum.

    In place ``x = fma(y, z, x)``, rounded to fp32 and then to x's dtype; of this x,
    ``v = x / sqrt(mean(x**2) + 1e-6)`` (arXiv 1910.07467) is quantized as :func:`blockwise_quantize` does.

    Args:
        x: ``[b, s, h]`` (any rank from 1); bf16, fp16 or fp32, as are the next two, each of its own dtype. Any strides
            with a contiguous last dimension. **Written to.** It must not overlap y, z or itself; interleaved views of
            one allocation, such as the chunks of a fused projection, do not.
        y: x's shape.
        z: ``[b, 1 or s, h]``, or anything that broadcasts to x's leading sizes.

    Returns:
        (q, scales) as :func:`blockwise_quantize`. A zero row gives zeros. A row whose sum of squares is not finite in
        fp32 has q 0 and scales NaN.

    Raises:
        RuntimeError: an argument breaks a rule above, or x requires grad while grad mode is on; x is as it was then.
    """
    return call_in_place(_ops.rms_fma_quantize.default, x, y, z)


def rms_fma_triton(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """:func:`blockwise_quantize_rms_fma_triton` with the norm as bf16, not quantized.

    Args:
        x, y, z: as there; x is written to.

    Returns:
        ``[b, s, h]`` bf16, contiguous. A zero row gives zeros; a row whose sum of squares is not finite in fp32 gives
        NaN everywhere.

    Raises:
        RuntimeError: as there.
    """
    return call_in_place(_ops.rms_fma.default, x, y, z)


def gated_attention_triton(x: Tensor, gate_logits: Tensor, quantize: bool = True) -> tuple[Tensor, Tensor | None]:
    """Each head of x times its gate ``2 * sigmoid(gate_logits)``, quantized unless asked not to.

    Args:
        x: ``[b, s, n * d]`` (any rank from 1), heads side by side; bf16, fp16 or fp32. Any strides with a contiguous
            last dimension.
        gate_logits: ``[b, s, n]``, bf16, fp16 or fp32. Any strides with a contiguous last dimension.
        quantize: quantize the result as :func:`blockwise_quantize` does, in blocks over the row, across heads.

    Returns:
        (out, scales): out of x's shape, fp8 with scales as :func:`blockwise_quantize` has them; or bf16 and None.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it, the rule and the value.
    """
    out, scales = route(_ops.gated_attention.default)(x, gate_logits, quantize)
    return out, scales if quantize else None
