#pragma once

#include <optional>

#include "common/stream.h"
#include "common/tensor.h"

// fp8_gemm: a times b transposed, a in 8 and b in 8 or 6 bits, with scales by blocks of 128 along k.
//
//   acc[i, j] = sum over blocks c of k:  (sum over k in c: a[i, k] * b[j, k]) * (a_scales[i, c] * b_scales[j / 128, c])
//   out[i, j] = round((acc[i, j] + bias[j]) + residual[i, j])
//
// Sums, products with scales and the last additions are fp32, rounded once to out_dtype; acc starts at +0. b is e4m3 or
// packed fp6 (common/fp6.h). a, b and residual have contiguous last dimensions and any row strides, scales and bias any
// strides; nothing aliases the output. m >= 0; n a positive multiple of 8, k of 16; last blocks may be partial. A NaN
// byte poisons what it enters, a NaN scale its block's outputs; a NaN in the output is the quiet one of its dtype.
// Nothing past the m rows of a, residual and a_scales is read. Deterministic.
//
// use_fast_accum (half-precision sums on GPUs where those are faster) is a hint for packed fp6 b, whose range proves
// that no sum overflows; the CPU backend never needs it.
//
// Scaling by blocks: DeepSeek-AI, DeepSeek-V3 (arXiv 2412.19437), section 3.3.
namespace ltx {

struct Fp8GemmParams {
  TensorView a;                        // [m, k] fp8
  TensorView a_scales;                 // [m, ceil(k / 128)] bf16, fp16 or fp32
  TensorView b;                        // [n, k] fp8, or [n, k * 3 / 4] uint8
  TensorView b_scales;                 // [ceil(n / 128), ceil(k / 128)] bf16, fp16 or fp32
  std::optional<TensorView> bias;      // [n] fp32
  std::optional<TensorView> residual;  // [m, n] out_dtype
  bool use_fast_accum = false;
  DType out_dtype = DType::kBFloat16;  // bf16, fp16 or fp32
  TensorView out;                      // [m, n] contiguous, out_dtype
};

void fp8_gemm_check(const Fp8GemmParams& params);
void fp8_gemm_cpu(const Fp8GemmParams& params);

}  // namespace ltx
