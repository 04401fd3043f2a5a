#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/fp8.h"

// How the kernels round a sum to out_dtype.
namespace ltx {

// Rounded to 16 bits. cvt and fp32 arithmetic make every NaN 0x7FFF and 0x7FFFFFFF: as a signed integer above all other
// values, so that a minimum turns it into the quiet NaN of the contract.
template <class T>
__device__ inline uint32_t round_pair(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    constexpr uint32_t kQuietNans = 0x7E007E00;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return __vmins2(bits, kQuietNans);
  } else {
    constexpr uint32_t kQuietNans = 0x7FC07FC0;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return __vmins2(bits, kQuietNans);
  }
}
__device__ inline float with_quiet_nan(float value) {
  return __int_as_float(min(__float_as_int(value), static_cast<int>(kQuietNanBits)));
}

}  // namespace ltx
