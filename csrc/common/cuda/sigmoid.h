#pragma once

namespace ltx {

// 1 / (1 + 2^-t), within 2^-21: two approximate instructions, whose subnormal results may be 0.
__device__ inline float sigmoid_base2(float t) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-t));
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

inline constexpr float kLog2E = 1.44269504f;

}  // namespace ltx
