"""The ops as plain formulas in torch, and the error that a rounded result may have: what the demo and the self-test
compare with. Everything computes in the precision of its arguments, float64 unless a device is slow at it."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # columns (of activations), or rows and columns (of weights), that share a scale

CHUNK = 1 << 22  # elements compared at a time, for memory's sake

# dtype: (mantissa bits, exponent of the smallest normal). FP6 values are e4m3 values of the lowest exponents.
_FORMATS = {
    torch.float32: (23, -126),
    torch.bfloat16: (7, -126),
    torch.float16: (10, -14),
    torch.float8_e4m3fn: (3, -6),
}
_EXPONENT_BITS = {torch.float64: (torch.int64, 0x7FF << 52), torch.float32: (torch.int32, 0xFF << 23)}


def spread_scales(scales: Tensor, shape: torch.Size) -> Tensor:
    """A scale for every element of a quantized tensor; one a row and block, or one a tile of a weight."""
    rows = shape[:-1].numel()
    if scales.shape[0] != rows:
        scales = scales.repeat_interleave(BLOCK, 0)[:rows]
    return scales.repeat_interleave(BLOCK, 1)[:, : shape[-1]].reshape(shape)


def dequantize(q: Tensor, scales: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return q.to(dtype).mul_(spread_scales(scales, q.shape))


def half_step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbours in dtype around each float64 or float32 value: the largest rounding error."""
    mantissa_bits, smallest_exponent = _FORMATS[dtype]
    integers, exponent_bits = _EXPONENT_BITS[value.dtype]
    power_of_two = (value.view(integers) & exponent_bits).view(value.dtype)
    return power_of_two.clamp_(min=2.0**smallest_exponent) * 2.0 ** -(mantissa_bits + 1)


def error_and_limit(
    output: Tensor | tuple[Tensor, Tensor], exact: Tensor, computing: float = 0.0
) -> tuple[float, float]:
    """The relative error |output - exact| / |exact| (Frobenius norms), and the largest that a right result can have.

    That is half a step of the output's format at every element, plus `computing`, a relative error, for what happens
    before the rounding. Errors of rounding alone are spread evenly over a step, which comes to 1/sqrt(3) of the limit.

    Args:
        output: of any float dtype, or a quantized pair (q, scales) with q in fp8.
        exact: the same as plain numbers, float64 or float32.
    """
    q, scales = output if isinstance(output, tuple) else (output, None)
    operands = [q, exact] if scales is None else [q, exact, spread_scales(scales, q.shape)]
    rows = max(1, CHUNK // q.shape[-1])
    squares = torch.zeros(3, dtype=torch.float64, device=exact.device)
    for chunk in zip(*(t.flatten(0, -2).split(rows) for t in operands), strict=True):
        values, wanted, *scale = (t.to(exact.device, exact.dtype) for t in chunk)
        step = scale[0] if scale else 1.0
        error = values * step - wanted
        rounding = half_step(wanted / step, q.dtype) * step
        squares += torch.stack([t.square().sum() for t in (error, rounding, wanted)])
    error_norm, rounding_norm, exact_norm = squares.sqrt().tolist()
    return error_norm / exact_norm, rounding_norm / exact_norm + computing


def rms_norm(x: Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weights is None else normed * weights


def adanorm(x: Tensor, weights: Tensor | None, scale: Tensor, shift: Tensor) -> Tensor:
    return rms_norm(x, weights, eps=1e-5) * (1 + scale) + shift


def split_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of each head: x [b, s, n * d], tables [b or 1, n, s, d / 2]."""
    first, second = x.unflatten(-1, (cos.shape[1], -1)).transpose(1, 2).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).transpose(1, 2).flatten(2)


def interleaved_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbours: x and tables [..., h]."""
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2) * sin


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of [b, s, n * d] tensors, a head at a time: s * s numbers are the most it holds."""
    out = torch.empty_like(q)
    for q_head, k_head, v_head, out_head in zip(*(t.chunk(heads, dim=-1) for t in (q, k, v, out)), strict=True):
        scores = q_head @ k_head.transpose(1, 2) / q_head.shape[-1] ** 0.5
        out_head.copy_(torch.softmax(scores, dim=-1) @ v_head)
    return out


def gate_heads(x: Tensor, logits: Tensor) -> Tensor:
    heads = x.unflatten(-1, (logits.shape[-1], -1))
    return (heads * (2 * torch.sigmoid(logits)).unsqueeze(-1)).flatten(-2)


def gelu(x: Tensor, form: str = "tanh") -> Tensor:
    if form == "sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh")
