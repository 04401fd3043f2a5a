#pragma once

#include "blockwise/fp8_gemm/fp8_gemm.h"

// The kernels behind fp8_gemm_cuda, which hands them checked params of at least one row, b in e4m3, a_scales and bias
// that they read in place, use_fast_accum only if b was fp6, and a configuration of their own.
namespace ltx {

void fp8_gemm_sm89(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream);
void fp8_gemm_sm90(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream);

}  // namespace ltx
