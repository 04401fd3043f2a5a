#pragma once

#include "common/stream.h"
#include "common/tensor.h"

// quantize: e4m3 values and one fp32 scale for each row and 128 columns, of x or of GELU(x).
//
//   v = x                                                                                   kNone
//   v = x * sigmoid(2u),  u = 0.7978845608 * (x + 0.044715 * x^3)                           kTanh
//   v = x * sigmoid(1.702 * x)                                                              kSigmoid
//   q, scale = the block of v, as blockwise/quantize_block.h says, scale_max 448
//
// x is bf16, fp16 or fp32, of any strides but a contiguous last dimension, any sizes (0 too), not written to. Nothing
// outside its rows is read. Without GELU all backends agree bit for bit. With it v is fp32 arithmetic,
// sigmoid(t) = 1 / (1 + exp(-t)); scales are within 2^-18 of the block's largest |x| / 448 and q * scale within half a
// unit in the last place of q plus 2^-18 |x| of a float64 v. v is not finite exactly where x is not: such a block is
// poisoned, and x^3 or exp overflowing alone does not do it (their sigmoid is 0 or 1). Deterministic.
// GELU: Hendrycks and Gimpel (arXiv 1606.08415); 0.5 * x * (1 + tanh(u)) = x * sigmoid(2u).
namespace ltx {

enum class Gelu : uint8_t { kNone, kTanh, kSigmoid };

struct QuantizeParams {
  TensorView x;  // [..., hidden] bf16, fp16 or fp32
  Gelu gelu = Gelu::kNone;
  TensorView q;       // [..., hidden] contiguous, fp8
  TensorView scales;  // [rows, num_blocks(hidden)], strides (1, padded_rows(rows))
};

void quantize_check(const QuantizeParams& params);
void quantize_cpu(const QuantizeParams& params);
void quantize_cuda(const QuantizeParams& params, Stream stream);

}  // namespace ltx
