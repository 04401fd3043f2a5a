#pragma once

#include "common/stream.h"
#include "common/tensor.h"

// quantize_weights: e4m3 values and one fp32 scale for each tile of 128 x 128 weights.
//
//   q, scale = the tile of w, as blockwise/quantize_block.h says
//
// scale_max is rounded to fp32 first: 448 for fp8; 0.1172 for values that fp6_pack keeps exactly, since
// |w * (0.1172 / amax_c)| rounds to 15/128 = 0.1171875 at most. q is fp8 in both ranges. The last tiles of a row and of
// a column may be smaller. w is bf16, fp16 or fp32, of any strides but a contiguous last dimension, any sizes (0 too),
// not written to. An fp32 amax above scale_max * 3.4e38 has the scale +Inf. block_size is 128, the only one there is.
// All backends agree bit for bit. Deterministic.
namespace ltx {

struct QuantizeWeightsParams {
  TensorView w;  // [out, in] bf16, fp16 or fp32
  int64_t block_size = 0;
  double scale_max = 0;
  TensorView q;       // [out, in] contiguous, fp8
  TensorView scales;  // [num_blocks(out), num_blocks(in)] contiguous, fp32
};

void quantize_weights_check(const QuantizeWeightsParams& params);
void quantize_weights_cpu(const QuantizeWeightsParams& params);
void quantize_weights_cuda(const QuantizeWeightsParams& params, Stream stream);

}  // namespace ltx
