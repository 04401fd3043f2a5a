#pragma once

#include <optional>
#include <string>

#include "blockwise/fp8_gemm/fp8_gemm_config.h"
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
// On a GPU acc may start as the first product, products are added by fused multiply-adds, and sums over a block have
// the precision of the tensor cores. There no size is above 2^30; a and an e4m3 b start at multiples of 16 bytes, as do
// their rows. A workspace holds what the kernels do not read in place: b unpacked, n * k bytes, if it is fp6; a_scales
// in fp32, unless they are that, column-major and aligned as blockwise/quantize_block.h has them; bias, unless it is
// contiguous and aligned to 8 bytes.
//
// use_fast_accum lets sums over a block be half precision, for packed fp6 b alone, whose range proves that none
// overflows: a relative error of at most 2e-3 (Frobenius norm). A hint, which the SM89 kernel takes and no other.
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
  DType out_dtype = DType::kBFloat16;   // bf16, fp16 or fp32
  std::optional<Fp8GemmConfig> config;  // for tests: the kernel and its tiles, instead of those chosen
  TensorView out;                       // [m, n] contiguous, out_dtype
  void* workspace = nullptr;            // [fp8_gemm_workspace_bytes(params)] bytes, aligned to 256
};

void fp8_gemm_check(const Fp8GemmParams& params);
int64_t fp8_gemm_workspace_bytes(const Fp8GemmParams& params);
// Whether the kernels read these in place.
bool fp8_gemm_reads_scales(const TensorView& a_scales);
bool fp8_gemm_reads_bias(const TensorView& bias);
void fp8_gemm_cpu(const Fp8GemmParams& params);

// What keeps the kernel `arch` from running on a device that runs this build's other CUDA code, or "". A call without a
// config runs kFp8GemmPublicArch.
std::string fp8_gemm_device_lacks(int device, int arch);
void fp8_gemm_cuda(const Fp8GemmParams& params, Stream stream);

}  // namespace ltx
