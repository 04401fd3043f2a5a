#pragma once

#include <bit>
#include <cstdint>

// bf16 and fp16 on a CPU: integer arithmetic, round to nearest even, the same on every compiler.
namespace ltx {

inline float decode_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t encode_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded >> 16);
}

inline float decode_float16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | magnitude << 13);  // infinity, NaN
  // The bits as an fp32 are the value times 2^-112 (the difference of the biases), subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

inline uint16_t encode_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t half;
  if (magnitude > 0x7F800000) {
    half = 0x7E00;
  } else if (magnitude >= 0x477FF000) {  // 65520 and more round to infinity
    half = 0x7C00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: a multiple of 2^-24, which is the last bit of 0.5
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
  } else {
    half = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace ltx
