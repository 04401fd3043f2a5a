#pragma once

#include "common/stream.h"
#include "common/tensor.h"

// dequantize: bf16 values of e4m3 values and their scales, one a row and 128 columns.
//
//   out[row, column] = bf16(fp32(q[row, column] * scales[row, column / 128]))
//
// The product is rounded to fp32, then to bf16, both to nearest even, subnormals kept; NaN (q 0x7F or 0xFF, or a NaN
// scale) is 0x7FC0. All backends agree bit for bit. q has any rank from 1 and any strides but a contiguous last
// dimension. scales are bf16, fp16 or fp32, of any strides, exactly one a row and block: their shape is
// [rows, num_blocks(hidden)] or q's leading sizes and num_blocks(hidden). Nothing aliases the output. Any sizes (0
// too). Deterministic.
//
// dequantize_weights: the same with one scale for each tile of 128 x 128,
//   out[row, column] = bf16(fp32(q[row, column] * scales[row / 128, column / 128]))
namespace ltx {

struct DequantizeParams {
  TensorView q;       // [..., hidden] fp8
  TensorView scales;  // [rows, num_blocks(hidden)] or [..., num_blocks(hidden)], any strides
  TensorView out;     // [..., hidden] contiguous, bf16
};

struct DequantizeWeightsParams {
  TensorView q;       // [out, in] fp8
  TensorView scales;  // [num_blocks(out), num_blocks(in)], any strides
  TensorView out;     // [out, in] contiguous, bf16
};

void dequantize_check(const DequantizeParams& params);
void dequantize_weights_check(const DequantizeWeightsParams& params);
void dequantize_cpu(const DequantizeParams& params);
void dequantize_weights_cpu(const DequantizeWeightsParams& params);
void dequantize_cuda(const DequantizeParams& params, Stream stream);
void dequantize_weights_cuda(const DequantizeWeightsParams& params, Stream stream);

}  // namespace ltx
