#pragma once

#include "common/stream.h"
#include "ops/norm_rope.h"

// rms_norm_split_rope: RMS norm over a row, then split-half rotary embedding of each head.
//
//   rstd = 1 / sqrt(mean(x^2) + eps);  v = x * rstd * weights;  v1, v2 = the halves of a head of v
//   y1 = v1 * cos - v2 * sin;  y2 = v2 * cos + v1 * sin
//
// x is [batch, tokens, heads * head_dim], the norm runs over its whole rows; weights is [heads * head_dim]. The tables
// are [batch or 1, heads, tokens, head_dim / 2], usually a [batch, tokens, heads, head_dim / 2] tensor with two axes
// swapped; any strides but a contiguous last dimension. Heads and head_dim come from them. Dtypes, strides of x,
// arithmetic, output, zero and NaN rows: as rms_norm_rope. Any even head_dim.
//
// rms_norm_split_rope_qk does it for q and k in one launch; a table that both share is read once.
// Formula: the half-split form of Su et al., RoFormer (arXiv 2104.09864), as GPT-NeoX and LTX-2 use it.
namespace ltx {

void rms_norm_split_rope_check(const NormRopeParams& params);
void rms_norm_split_rope_qk_check(const NormRopeQkParams& params);
void rms_norm_split_rope_cpu(const NormRopeParams& params);
void rms_norm_split_rope_qk_cpu(const NormRopeQkParams& params);
void rms_norm_split_rope_cuda(const NormRopeParams& params, Stream stream);
void rms_norm_split_rope_qk_cuda(const NormRopeQkParams& params, Stream stream);

}  // namespace ltx
