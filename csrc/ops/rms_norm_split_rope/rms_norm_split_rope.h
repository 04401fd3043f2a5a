#pragma once

#include <optional>

#include "common/stream.h"
#include "common/tensor.h"

// rms_norm_split_rope: RMS norm over a row, then split-half rotary embedding of each head.
//
//   rstd = 1 / sqrt(mean(x^2) + eps);  v = x * rstd * weights;  v1, v2 = the halves of a head of v
//   y1 = v1 * cos - v2 * sin;  y2 = v2 * cos + v1 * sin
//
// The norm runs over the whole row of heads * head_dim. Heads and head_dim come from the tables, which are usually a
// [batch, tokens, heads, head_dim / 2] tensor with two axes swapped; any strides but a contiguous last dimension.
// Dtypes, strides of x, arithmetic, output, zero and NaN rows: as rms_norm_rope. Any even head_dim.
//
// rms_norm_split_rope_qk does it for q and k in one launch; a table that both share is read once.
// Formula: the half-split form of Su et al., RoFormer (arXiv 2104.09864), as GPT-NeoX and LTX-2 use it.
namespace ltx {

struct RmsNormSplitRopeParams {
  TensorView x;                       // [batch, tokens, heads * head_dim] bf16, fp16 or fp32
  TensorView cos_freqs;               // [batch or 1, heads, tokens, head_dim / 2]
  TensorView sin_freqs;               // the same sizes, its own strides and dtype
  std::optional<TensorView> weights;  // [heads * head_dim]
  double eps = 0;
  TensorView out;  // [batch, tokens, heads * head_dim] contiguous, bf16, fp16 or fp8
};

struct RmsNormSplitRopeQkParams {
  RmsNormSplitRopeParams q;
  RmsNormSplitRopeParams k;  // its tables are q's where the caller gives none, then k has q's shape
};

void rms_norm_split_rope_check(const RmsNormSplitRopeParams& params);
void rms_norm_split_rope_qk_check(const RmsNormSplitRopeQkParams& params);
void rms_norm_split_rope_cpu(const RmsNormSplitRopeParams& params);
void rms_norm_split_rope_qk_cpu(const RmsNormSplitRopeQkParams& params);
void rms_norm_split_rope_cuda(const RmsNormSplitRopeParams& params, Stream stream);
void rms_norm_split_rope_qk_cuda(const RmsNormSplitRopeQkParams& params, Stream stream);

}  // namespace ltx
