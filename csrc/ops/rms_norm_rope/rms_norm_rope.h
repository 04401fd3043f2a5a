#pragma once

#include "common/stream.h"
#include "ops/norm_rope.h"

// rms_norm_rope: RMS norm over a row, then interleaved rotary embedding.
//
//   rstd = 1 / sqrt(mean(x^2) + eps);  v = x * rstd * weights
//   y[2i] = v[2i] * cos[2i] - v[2i+1] * sin[2i];  y[2i+1] = v[2i+1] * cos[2i+1] + v[2i] * sin[2i+1]
//
// x is [..., hidden], weights [hidden]. Tables hold a value an element [..., hidden] or a value a pair [..., hidden /
// 2], and broadcast to x's leading sizes. x, tables and weights are each bf16, fp16 or fp32, with any strides but a
// contiguous last dimension; nothing aliases the output. Arithmetic is fp32, rounded once; the CPU backend sums squares
// in double and rounds that sum. A zero row gives zeros. A row whose sum of squares is not finite in fp32 gives NaN
// everywhere. The output is bf16 (fp16 if x is) or fp8: finite values saturate at 448, anything else is NaN (0x7F).
// Deterministic; any even hidden size; leading sizes may be 0.
//
// rms_norm_rope_qk does it for q and k in one launch; a table that both share is read once.
// Formula: Su et al., RoFormer (arXiv 2104.09864); Zhang and Sennrich, RMSNorm (arXiv 1910.07467).
namespace ltx {

void rms_norm_rope_check(const NormRopeParams& params);
void rms_norm_rope_qk_check(const NormRopeQkParams& params);
void rms_norm_rope_cpu(const NormRopeParams& params);
void rms_norm_rope_qk_cpu(const NormRopeQkParams& params);
void rms_norm_rope_cuda(const NormRopeParams& params, Stream stream);
void rms_norm_rope_qk_cuda(const NormRopeQkParams& params, Stream stream);

}  // namespace ltx
