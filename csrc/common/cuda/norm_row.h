#pragma once

#include "common/fp8.h"

namespace ltx {

// 1 / sqrt(mean + eps), or NaN where the sum of squares is not finite.
__device__ inline float reciprocal_rms(float sum, float hidden_inverse, float eps) {
  const float rstd = rsqrtf(sum * hidden_inverse + eps);
  return sum < __uint_as_float(kInfinityBits) ? rstd : __uint_as_float(kQuietNanBits);
}

}  // namespace ltx
