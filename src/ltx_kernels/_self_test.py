"""Each op once, on a small input that ends in partial blocks, against its formula in float64."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_kernels import _exact
from ltx_kernels._backends import set_backend
from ltx_kernels._block import PRODUCT
from ltx_kernels.blockwise import functional, linear

FP8 = torch.float8_e4m3fn
BATCH, TOKENS, HEADS, HEAD_DIM = 2, 3, 5, 40
HIDDEN = HEADS * HEAD_DIM  # 200: a block of 128 and one of 72
IN, OUT = 208, 136

# exp, rsqrt and row sums in fp32, before the rounding.
FP32 = 2.0**-18
# A layer that dequantizes rounds its weight and its input to bf16.
BF16_OPERANDS = 2.0**-8

Comparisons = list[tuple[Any, Tensor]]  # (output, exact)


@dataclass(frozen=True)
class Result:
    op: str
    backend: str
    error: float | None  # of its first output; None: compared byte by byte, or nothing to compare
    limit: float | None
    reason: str  # why it failed, or empty


def run(available: Iterable[tuple[str, str]]) -> list[Result]:
    """The result of each (op, backend)."""
    return [_run(op, backend) for op, backend in available]


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend in ("cuda", "triton") else "cpu")


def _run(op: str, backend: str) -> Result:
    set_backend(op, backend)
    try:
        with torch.no_grad():
            return _judged(op, backend, CASES[op](Put(device_of(backend))))
    except Exception as raised:  # noqa: BLE001  (whatever a broken installation raises is its result)
        return Result(op, backend, None, None, str(raised))
    finally:
        set_backend(op, None)


def _judged(op: str, backend: str, comparisons: Comparisons) -> Result:
    shown: tuple[float | None, float | None] = (None, None)
    for output, exact in comparisons:
        if exact.dtype == torch.uint8:
            if not torch.equal(output.cpu(), exact):
                return Result(op, backend, None, None, "bytes differ")
            continue
        error, limit = _exact.error_and_limit(output, exact, _computing(op, backend))
        if not error <= limit:
            return Result(op, backend, error, limit, f"error must be at most {limit:.1e}, got {error:.1e}")
        shown = shown if shown[0] is not None else (error, limit)
    return Result(op, backend, *shown, "")


def _computing(op: str, backend: str) -> float:
    if backend == "dequantize":
        return BF16_OPERANDS
    return PRODUCT if op in ("fp8_gemm", "linear") else FP32


class Put:
    """Draws numbers of a fixed seed; calling it moves a tensor to the device under test."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def scales(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) + 0.5


def _rms_norm_rope(put: Put) -> Comparisons:
    x, weights, exact, (cos, sin) = _norm_inputs(put, TOKENS, HIDDEN, rope=_exact.interleaved_rope)
    return [(functional.rms_norm_rope(put(x), cos, sin, weights), exact)]


def _rms_norm_rope_qk(put: Put) -> Comparisons:
    x, weights, exact, (cos, sin) = _norm_inputs(put, TOKENS, HIDDEN, rope=_exact.interleaved_rope)
    q, k = functional.rms_norm_rope_qk(put(x), put(-x), cos, sin, weights, weights)
    return [(q, exact), (k, -exact)]


def _rms_norm_split_rope(put: Put) -> Comparisons:
    x, weights, exact, (cos, sin) = _norm_inputs(put, 1, HEADS, TOKENS, HEAD_DIM // 2, rope=_exact.split_rope)
    return [(functional.rms_norm_split_rope(put(x), cos, sin, weights), exact)]


def _rms_norm_split_rope_qk(put: Put) -> Comparisons:
    x, weights, exact, (cos, sin) = _norm_inputs(put, 1, HEADS, TOKENS, HEAD_DIM // 2, rope=_exact.split_rope)
    q, k = functional.rms_norm_split_rope_qk(put(x), put(-x), cos, sin, weights, weights)
    return [(q, exact), (k, -exact)]


def _norm_inputs(
    put: Put, *table: int, rope: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    x, weights, cos, sin = put.draw(BATCH, TOKENS, HIDDEN), put.draw(HIDDEN), put.draw(*table), put.draw(*table)
    exact = rope(_exact.rms_norm(x.double(), weights.double()), cos.double(), sin.double())
    return x, put(weights), exact, (put(cos), put(sin))


# Four codes in three bytes, written out: the bits of the codes 000001 100010 011111 111111 in a row.
_FP6_VALUES = [0x01, 0x82, 0x1F, 0x9F]
_FP6_PACKED = [0b00000110, 0b00100111, 0b11111111]


def _fp6_pack(put: Put) -> Comparisons:
    return [(functional.fp6_pack_tensor(put(_bytes(_FP6_VALUES))), _bytes(_FP6_PACKED))]


def _fp6_unpack(put: Put) -> Comparisons:
    return [(functional.fp6_unpack_tensor(put(_bytes(_FP6_PACKED)), 4), _bytes(_FP6_VALUES))]


def _bytes(values: list[int]) -> Tensor:
    return torch.tensor([values], dtype=torch.uint8)


def _quantize(put: Put) -> Comparisons:
    x = put.draw(BATCH, TOKENS, HIDDEN)
    return [
        (functional.blockwise_quantize(put(x)), x.double()),
        (functional.blockwise_quantize(put(x), gelu="tanh"), _exact.gelu(x.double())),
        (functional.blockwise_quantize(put(x), gelu="sigmoid"), _exact.gelu(x.double(), "sigmoid")),
    ]


def _quantize_weights(put: Put) -> Comparisons:
    w = put.draw(OUT, HIDDEN)
    exact = w.double()
    return [
        (functional.fp8_blockwise_quantize_weights_torch(put(w)), exact),
        (functional.fp6_blockwise_quantize_weights_torch(put(w)), exact),
    ]


def _dequantize(put: Put) -> Comparisons:
    q, scales = put.draw(TOKENS, HIDDEN, dtype=FP8), put.scales(TOKENS, 2)
    return [(functional.blockwise_dequantize((put(q), put(scales))), _exact.dequantize(q, scales))]


def _dequantize_weights(put: Put) -> Comparisons:
    q, scales = put.draw(OUT, HIDDEN, dtype=FP8), put.scales(2, 2)
    return [(functional.blockwise_dequantize_weights(put(q), put(scales)), _exact.dequantize(q, scales))]


def _adanorm_quantize(put: Put) -> Comparisons:
    x, w = put.draw(BATCH, TOKENS, HIDDEN), put.draw(HIDDEN)
    scale, shift = put.draw(BATCH, 1, HIDDEN), put.draw(BATCH, 1, HIDDEN)
    exact = _exact.adanorm(x.double(), w.double(), scale.double(), shift.double())
    return [(functional.blockwise_quantize_adanorm_triton(put(x), put(w), put(scale), put(shift)), exact)]


def _rms_fma_quantize(put: Put) -> Comparisons:
    return _rms_fma_with(put, functional.blockwise_quantize_rms_fma_triton)


def _rms_fma(put: Put) -> Comparisons:
    return _rms_fma_with(put, functional.rms_fma_triton)


def _rms_fma_with(put: Put, op: Callable[..., Any]) -> Comparisons:
    x, y, z = (put.draw(BATCH, size, HIDDEN, dtype=torch.float32) for size in (TOKENS, TOKENS, 1))
    updated = x.double() + y.double() * z.double()
    x = put(x)
    return [(op(x, put(y), put(z)), _exact.rms_norm(updated)), (x, updated)]


def _gated_attention(put: Put) -> Comparisons:
    x, logits = put.draw(BATCH, TOKENS, HIDDEN), put.draw(BATCH, TOKENS, HEADS)
    exact = _exact.gate_heads(x.double(), logits.double())
    quantized = functional.gated_attention_triton(put(x), put(logits))
    return [(quantized, exact), (functional.gated_attention_triton(put(x), put(logits), quantize=False)[0], exact)]


def _fp8_gemm(put: Put) -> Comparisons:
    a, b, bias, exact = _product_inputs(put)
    residual = put.draw(TOKENS, OUT)
    out = linear.blockwise_fp8_gemm(a, b, put(bias), False, residual=put(residual))
    return [(out, exact + residual.double())]


def _linear(put: Put) -> Comparisons:
    a, b, bias, exact = _product_inputs(put)
    layer = linear.BlockwiseFP8Linear(IN, OUT, device=put.device)
    for name, value in (("weight", b[0]), ("weight_scale", b[1]), ("bias", bias)):
        getattr(layer, name).copy_(value)
    return [(layer(a), exact)]


def _product_inputs(put: Put) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor, Tensor]:
    a, b = (put.draw(TOKENS, IN, dtype=FP8), put.scales(TOKENS, 2)), (put.draw(OUT, IN, dtype=FP8), put.scales(2, 2))
    bias = put.draw(OUT, dtype=torch.float32)
    exact = F.linear(_exact.dequantize(*a), _exact.dequantize(*b), bias.double())
    return (put(a[0]), put(a[1])), (put(b[0]), put(b[1])), bias, exact


CASES: dict[str, Callable[[Put], Comparisons]] = {
    "rms_norm_rope": _rms_norm_rope,
    "rms_norm_rope_qk": _rms_norm_rope_qk,
    "rms_norm_split_rope": _rms_norm_split_rope,
    "rms_norm_split_rope_qk": _rms_norm_split_rope_qk,
    "fp6_pack": _fp6_pack,
    "fp6_unpack": _fp6_unpack,
    "quantize": _quantize,
    "quantize_weights": _quantize_weights,
    "dequantize": _dequantize,
    "dequantize_weights": _dequantize_weights,
    "adanorm_quantize": _adanorm_quantize,
    "rms_fma_quantize": _rms_fma_quantize,
    "rms_fma": _rms_fma,
    "gated_attention": _gated_attention,
    "fp8_gemm": _fp8_gemm,
    "linear": _linear,
}
