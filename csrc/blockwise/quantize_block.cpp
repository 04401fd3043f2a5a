#include <algorithm>
#include <bit>
#include <cmath>

#include "blockwise/quantize_block.h"
#include "common/fp8.h"

namespace ltx {

uint32_t amax_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF);
  return largest;
}

BlockScale block_scale(uint32_t amax_bits, float scale_max) {
  if (amax_bits >= kInfinityBits) return {.multiplier = 0.0f, .scale = std::bit_cast<float>(kQuietNanBits)};
  const float amax_c = std::max(std::bit_cast<float>(amax_bits), kSmallestAmax);
  return {.multiplier = scale_max / amax_c, .scale = amax_c / scale_max};
}

void encode_block(const float* x, int64_t count, const BlockScale& block_scale, uint8_t* q) {
  if (std::isnan(block_scale.scale)) {
    std::fill_n(q, count, uint8_t{0});
    return;
  }
  for (int64_t i = 0; i < count; ++i) q[i] = encode_e4m3(x[i] * block_scale.multiplier);
}

void quantize_row(const float* x, int64_t row, const TensorView& q, const TensorView& scales) {
  const int64_t hidden = q.size(-1);
  for (int64_t block = 0; block < num_blocks(hidden); ++block) {
    const int64_t begin = block * kBlockSize;
    const int64_t count = std::min(kBlockSize, hidden - begin);
    const BlockScale scale = block_scale(amax_bits(x + begin, count), kFp8Max);
    encode_block(x + begin, count, scale, static_cast<uint8_t*>(q.data) + row * hidden + begin);
    static_cast<float*>(scales.data)[row * scales.stride(0) + block * scales.stride(1)] = scale.scale;
  }
}

void clear_padding(const TensorView& scales) {
  const int64_t rows = scales.size(0);
  for (int64_t block = 0; block < scales.size(1); ++block) {
    float* column = static_cast<float*>(scales.data) + block * scales.stride(1);
    std::fill(column + rows, column + padded_rows(rows), 0.0f);
  }
}

}  // namespace ltx
