#pragma once

#include <optional>

#include "common/stream.h"
#include "common/tensor.h"

// gated_attention: each head of x times its gate, then quantized, or as bf16.
//
//   v[head, i] = x[head, i] * (2 * sigmoid(gate_logits[head])),  sigmoid(t) = 1 / (1 + exp(-t))
//   with scales:    out, scale = the block of v, as blockwise/quantize_block.h says, scale_max 448
//   without scales: out = bf16(v)
//
// A row of x is heads * head_dim long, heads is gate_logits' last size; blocks run over the row, across heads. x and
// gate_logits are each bf16, fp16 or fp32, of any strides but a contiguous last dimension, and are not written to. Any
// head_dim, any leading sizes (0 too).
// Arithmetic is fp32. All backends agree with a float64 v: out, or out * scale, within half a unit in the last place
// plus 2^-18 |x|; scales within 2^-18 of the block's largest |x| / 448. Logits of -Inf and +Inf are gates of 0 and 2; v
// is NaN where a logit or x is, or where Inf meets a gate of 0, and poisons its block alone.
// Deterministic. Formula: the head gate of LTX-2's attention.
namespace ltx {

struct GatedAttentionParams {
  TensorView x;                      // [..., heads * head_dim] bf16, fp16 or fp32
  TensorView gate_logits;            // [..., heads], x's leading sizes
  TensorView out;                    // [..., heads * head_dim] contiguous, fp8, or bf16 without scales
  std::optional<TensorView> scales;  // [rows, num_blocks(heads * head_dim)], strides (1, padded_rows(rows))
};

void gated_attention_check(const GatedAttentionParams& params);
void gated_attention_cpu(const GatedAttentionParams& params);
void gated_attention_cuda(const GatedAttentionParams& params, Stream stream);

}  // namespace ltx
