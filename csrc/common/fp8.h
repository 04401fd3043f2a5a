#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// The e4m3fn format: sign, 4 exponent bits (bias 7), 3 mantissa bits; largest 448, no infinity, NaN is 0x7F and 0xFF.
namespace ltx {

inline constexpr float kFp8Max = 448.0f;
inline constexpr uint8_t kFp8Nan = 0x7F;
inline constexpr uint32_t kInfinityBits = 0x7F800000;  // of an fp32; NaNs lie above
inline constexpr uint32_t kQuietNanBits = 0x7FC00000;

// Round to nearest even; finite values saturate at 448, anything else is NaN (0x7F).
inline uint8_t encode_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  if (magnitude >= kInfinityBits) return kFp8Nan;
  if (magnitude >= std::bit_cast<uint32_t>(kFp8Max)) return sign | 0x7E;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    // Subnormal: a multiple of 2^-9. Adding 2^14, whose last bit is worth 2^-9, rounds to one and leaves it in the
    // low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(shifted) & 0xF);
  }
  const uint32_t rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1);
  constexpr uint32_t kBiasDifference = (127 - 7) << 3;
  return sign | static_cast<uint8_t>((rounded >> 20) - kBiasDifference);
}

// Of the low byte of `code`. Without branches or bytes, so that loops become vector code. An e4m3 subnormal is a normal
// fp32, and is had without a subnormal one on the way: those are slow on some CPUs, and 0 under
// torch.set_flush_denormal.
inline float decode_e4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80) << 24;
  const uint32_t magnitude = code & 0x7F;
  const uint32_t normal = (magnitude << 20) + ((127 - 7) << 23);
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(normal + (1 << 23)) - 0x1p-6f);
  const uint32_t finite = magnitude < 8 ? subnormal : normal;
  return std::bit_cast<float>(sign | (magnitude == kFp8Nan ? kQuietNanBits : finite));
}

}  // namespace ltx
