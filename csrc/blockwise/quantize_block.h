#pragma once

#include <cstdint>

#include "common/tensor.h"

// How a block becomes e4m3 values and a scale. A block is 128 columns of a row, or a tile of 128 x 128 weights; the
// last one of a row or column may be smaller and is a block like any other. Every quantizing op ends here.
//
//   amax = the largest |x|: the unsigned maximum of the bit patterns, so that NaN and Inf win
//   amax_c = max(amax, 2^-117);  q = e4m3(x * (scale_max / amax_c));  scale = amax_c / scale_max
//
// x is fp32, exact or as the op has computed it. Two divisions and one product, each correctly rounded to fp32 with
// subnormals kept; e4m3 rounds to nearest even, saturates at 448 and keeps the sign of a zero. So a block of zeros has
// zeros and a positive scale. amax not finite: every q is 0x00 and the scale is the NaN 0x7FC00000, so that the block
// dequantizes to NaN. x whose bits agree give q and scales whose bits agree, on every backend.
//
// Scales of rows are fp32 [rows, num_blocks(hidden)] with strides (1, padded_rows(rows)): column-major, each column
// padded to a multiple of 4 (16 bytes) with zeros, which the op writes. No rows: strides (1, 0).
namespace ltx {

inline constexpr int64_t kBlockSize = 128;
inline constexpr float kSmallestAmax = 0x1p-117f;  // 448 / 2^-117 and its product with 2^-117 are finite

constexpr int64_t num_blocks(int64_t size) { return (size + kBlockSize - 1) / kBlockSize; }
constexpr int64_t padded_rows(int64_t rows) { return (rows + 3) / 4 * 4; }

struct BlockScale {
  float multiplier;  // scale_max / amax_c
  float scale;       // NaN: every q of the block is 0x00
};

uint32_t amax_bits(const float* x, int64_t count);
BlockScale block_scale(uint32_t amax_bits, float scale_max);
void encode_block(const float* x, int64_t count, const BlockScale& block_scale, uint8_t* q);

// A row of fp32 into row `row` of q [rows, hidden], contiguous, and of its scales.
void quantize_row(const float* x, int64_t row, const TensorView& q, const TensorView& scales);
void clear_padding(const TensorView& scales);

}  // namespace ltx
