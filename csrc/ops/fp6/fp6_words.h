#pragma once

#include <array>
#include <cstdint>

// pack_fp6 and unpack_fp6 of common/fp6.h on 16 and 12 bytes at once, in 32-bit words: what the CUDA kernels compute,
// for the host too, so that a test without a GPU can compare the two.
namespace ltx {

// Byte i of the result is the byte of b:a (a the low word) that digit i of the selector names.
constexpr uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
#endif
}

// A word of four e4m3 bytes, the first lowest, <-> their codes in 24 bits, the first highest. The top byte of `codes`
// means nothing, in either direction.
constexpr uint32_t e4m3_to_codes(uint32_t e4m3) {
  const uint32_t too_large = (e4m3 | e4m3 >> 1) & 0x20202020;  // one of the two top exponent bits is set
  const uint32_t saturated = e4m3 | (too_large - (too_large >> 5));
  const uint32_t bytes = (saturated & 0x1F1F1F1F) | (e4m3 >> 2 & 0x20202020);
  const uint32_t pairs = (bytes & 0x003F003F) << 6 | (bytes >> 8 & 0x003F003F);
  return pairs << 12 | pairs >> 16;
}

constexpr uint32_t codes_to_e4m3(uint32_t codes) {
  const uint32_t bytes =
      (codes >> 18 & 0x3F) | (codes >> 4 & 0x3F00) | (codes << 10 & 0x3F0000) | (codes << 24 & 0x3F000000);
  return (bytes & 0x1F1F1F1F) | (bytes << 2 & 0x80808080);
}

// The 24 bits of four words lie in memory highest byte first: c[0] gives bytes 2 1 0, then c[1], ...
constexpr std::array<uint32_t, 3> pack_fp6_words(const std::array<uint32_t, 4>& e4m3) {
  const std::array<uint32_t, 4> c = {e4m3_to_codes(e4m3[0]), e4m3_to_codes(e4m3[1]), e4m3_to_codes(e4m3[2]),
                                     e4m3_to_codes(e4m3[3])};
  return {byte_permute(c[0], c[1], 0x6012), byte_permute(c[1], c[2], 0x5601), byte_permute(c[2], c[3], 0x4560)};
}

constexpr std::array<uint32_t, 4> unpack_fp6_words(const std::array<uint32_t, 3>& packed) {
  return {codes_to_e4m3(byte_permute(packed[0], packed[0], 0x0012)),
          codes_to_e4m3(byte_permute(packed[0], packed[1], 0x0345)),
          codes_to_e4m3(byte_permute(packed[1], packed[2], 0x0234)),
          codes_to_e4m3(byte_permute(packed[2], packed[2], 0x0123))};
}

}  // namespace ltx
