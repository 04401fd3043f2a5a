#pragma once

#include "common/stream.h"
#include "common/tensor.h"

// rms_fma_quantize: a gated residual added in place, then the RMS norm of the sum, quantized. rms_fma: the norm as
// bf16.
//
//   x = round(fma(y, z, x)), to x's dtype;  rstd = 1 / sqrt(mean(x^2) + 1e-6), of the rounded x;  v = x * rstd
//   rms_fma_quantize: q, scale = the block of v, as blockwise/quantize_block.h says, scale_max 448
//   rms_fma:          out = bf16(v)
//
// x is written to, at its own elements alone. x, y and z are each bf16, fp16 or fp32, of any strides but a contiguous
// last dimension; y has x's shape; z broadcasts to x's leading sizes: [batch, 1, hidden] or [batch, tokens, hidden],
// say. No element of x shares memory with another of x, or with y or z; interleaved views of one allocation are fine
// (common/overlap.h). Any sizes (0 too).
// fma rounds once to fp32, then x rounds to its dtype, both to nearest even: the new x agrees bit for bit on all
// backends, except that a NaN may be any NaN. Then fp32 arithmetic; the CPU backend sums squares in double and rounds
// that sum to fp32. All backends agree with the float64 v of the new x: out within half a unit in the last place plus
// 2^-18 |v|, q * scale the same (the unit of q), scales within 2^-18 of the block's largest |v| / 448. A zero row gives
// zeros. A row whose sum of squares, rounded to fp32, is not finite is NaN: in rms_fma_quantize all its blocks are
// poisoned. Deterministic. Formula: Zhang and Sennrich, RMSNorm (arXiv 1910.07467).
namespace ltx {

struct RmsFmaParams {
  TensorView x;    // [..., hidden] bf16, fp16 or fp32, in and out
  TensorView y;    // [..., hidden], x's shape
  TensorView z;    // [..., hidden], broadcasts to x's leading sizes
  TensorView out;  // [..., hidden] contiguous, bf16
};

struct RmsFmaQuantizeParams {
  TensorView x;  // as in RmsFmaParams, y and z too
  TensorView y;
  TensorView z;
  TensorView q;       // [..., hidden] contiguous, fp8
  TensorView scales;  // [rows, num_blocks(hidden)], strides (1, padded_rows(rows))
};

inline constexpr float kRmsFmaEps = 1e-6f;

void rms_fma_check(const RmsFmaParams& params);
void rms_fma_quantize_check(const RmsFmaQuantizeParams& params);
void rms_fma_cpu(const RmsFmaParams& params);
void rms_fma_quantize_cpu(const RmsFmaQuantizeParams& params);
void rms_fma_cuda(const RmsFmaParams& params, Stream stream);
void rms_fma_quantize_cuda(const RmsFmaQuantizeParams& params, Stream stream);

}  // namespace ltx
