#pragma once

#include <optional>

#include "common/stream.h"
#include "common/tensor.h"

// adanorm_quantize: RMS norm over a row, modulated, then quantized.
//
//   rstd = 1 / sqrt(mean(x^2) + 1e-5);  v = ((x * rstd) * w) * (1 + norm_scale) + norm_shift
//   q, scale = the block of v, as blockwise/quantize_block.h says, scale_max 448
//
// x, w, norm_scale and norm_shift are each bf16, fp16 or fp32, of any strides but a contiguous last dimension, and are
// not written to. norm_scale and norm_shift broadcast to x's leading sizes, each by itself: [batch, 1, hidden] or
// [batch, tokens, hidden], say. No w: ones. Any sizes (0 too).
// Arithmetic is fp32; the CPU backend computes in the order written, fuses no multiply-add, sums squares in double and
// rounds that sum to fp32. Others agree with a float64 v, where m is the larger of the last sum's two |addends|: q *
// scale within half a unit in the last place of q plus 2^-18 m, scales within 2^-18 of the block's largest m / 448. A
// zero row is norm_shift, quantized. A row whose sum of squares, rounded to fp32, is not finite is NaN: all its blocks
// are poisoned. A NaN or Inf of w, norm_scale or norm_shift poisons its own block. Deterministic. Formula: Zhang and
// Sennrich, RMSNorm (arXiv 1910.07467); Peebles and Xie, adaptive norm (arXiv 2212.09748).
namespace ltx {

struct AdanormQuantizeParams {
  TensorView x;                 // [..., hidden] bf16, fp16 or fp32
  std::optional<TensorView> w;  // [hidden]
  TensorView norm_scale;        // [..., hidden], broadcasts to x's leading sizes
  TensorView norm_shift;        // [..., hidden], broadcasts to x's leading sizes
  TensorView q;                 // [..., hidden] contiguous, fp8
  TensorView scales;            // [rows, num_blocks(hidden)], strides (1, padded_rows(rows))
};

inline constexpr float kAdanormEps = 1e-5f;

void adanorm_quantize_check(const AdanormQuantizeParams& params);
void adanorm_quantize_cpu(const AdanormQuantizeParams& params);
void adanorm_quantize_cuda(const AdanormQuantizeParams& params, Stream stream);

}  // namespace ltx
