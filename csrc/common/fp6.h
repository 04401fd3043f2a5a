#pragma once

#include <cstdint>

// The 6-bit format: E2M3 values, kept as the e4m3 bytes whose two top exponent bits are 0 (largest 0.1171875; no
// infinity, no NaN). A code is such a byte without those two bits; four codes are three bytes in memory.
namespace ltx {

inline constexpr float kFp6Max = 0.1171875f;

// What does not fit, NaN too, becomes the largest value of its sign.
constexpr uint8_t fp6_code(uint8_t e4m3) {
  const uint8_t sign = e4m3 >> 2 & 0x20;
  return sign | ((e4m3 & 0x60) != 0 ? 0x1F : e4m3 & 0x1F);
}

constexpr uint8_t fp6_to_e4m3(uint8_t code) { return (code & 0x20) << 2 | (code & 0x1F); }

constexpr void pack_fp6(const uint8_t* e4m3 /*4*/, uint8_t* packed /*3*/) {
  const uint32_t codes = uint32_t{fp6_code(e4m3[0])} << 18 | uint32_t{fp6_code(e4m3[1])} << 12 |
                         uint32_t{fp6_code(e4m3[2])} << 6 | fp6_code(e4m3[3]);
  packed[0] = static_cast<uint8_t>(codes >> 16);
  packed[1] = static_cast<uint8_t>(codes >> 8);
  packed[2] = static_cast<uint8_t>(codes);
}

constexpr void unpack_fp6(const uint8_t* packed /*3*/, uint8_t* e4m3 /*4*/) {
  const uint32_t codes = uint32_t{packed[0]} << 16 | uint32_t{packed[1]} << 8 | packed[2];
  e4m3[0] = fp6_to_e4m3(codes >> 18);
  e4m3[1] = fp6_to_e4m3(codes >> 12 & 0x3F);
  e4m3[2] = fp6_to_e4m3(codes >> 6 & 0x3F);
  e4m3[3] = fp6_to_e4m3(codes & 0x3F);
}

}  // namespace ltx
