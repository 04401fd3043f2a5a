"""Formats of numbers where Triton's own casts do not keep the contract, on a GPU or in the interpreter."""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
INFINITY_BITS = tl.constexpr(0x7F800000)  # of an fp32; NaNs lie above
QUIET_NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST_NORMAL_E4M3_BITS = tl.constexpr((127 - 6) << 23)  # 2^-6, as fp32
TWO_TO_120 = tl.constexpr(2.0**120)


@triton.constexpr_function
def has_e4m3_casts() -> bool:
    """Of the device that is compiled for. Those of the interpreter round wrongly."""
    return not INTERPRETED.value and cuda_capability_geq(8, 9)


@triton.jit
def magnitude_bits(v):
    """The bits of |v|, which order as the magnitudes do, NaN above Inf above all."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_e4m3(v):
    """The e4m3 bytes of finite fp32: to nearest even, saturating at 448. Without hardware, anything else is 0x7F."""
    if has_e4m3_casts():
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        magnitude = magnitude_bits(v)
        # Below 2^-6: a multiple of 2^-9, the last bit of 2^14, which rounds to one and leaves it in the low bits.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        code = tl.where(magnitude < SMALLEST_NORMAL_E4M3_BITS, subnormal, tl.minimum(normal, 0x7E))
        sign = (v.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(magnitude < INFINITY_BITS, sign | code, 0x7F).to(tl.uint8)


@triton.jit
def decode_e4m3(q):
    """fp32 of e4m3 bytes."""
    if has_e4m3_casts():
        return q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = q.to(tl.uint32)
        # The bits as an fp32 are the value times 2^-120 (the difference of the biases), subnormals included.
        bits = (code & 0x80) << 24 | (code & 0x7F) << 20
        value = bits.to(tl.float32, bitcast=True) * TWO_TO_120
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def to_float32(values):
    """fp32 of bf16, fp16 or fp32. The interpreter's cast loses the subnormals of bf16."""
    if INTERPRETED and values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def rounded(v, dtype: tl.constexpr):
    """fp32 as bf16, fp16 or fp32, to nearest even. A NaN of bf16 is 0x7FC0: the hardware makes 0x7FFF of it."""
    if dtype == tl.bfloat16:
        if INTERPRETED:  # its cast truncates
            bits = v.to(tl.uint32, bitcast=True)
            encoded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        else:
            encoded = v.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        is_nan = magnitude_bits(v) > INFINITY_BITS
        return tl.where(is_nan, 0x7FC0, encoded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(dtype)


@triton.jit
def fma(a, b, c):
    """a * b + c, rounded once. The interpreter's rounds twice; by way of fp64 one in 2^29 results is."""
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)
