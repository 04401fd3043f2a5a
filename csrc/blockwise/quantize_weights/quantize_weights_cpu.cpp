#include "blockwise/quantize_weights/quantize_weights.h"

#include <algorithm>
#include <string>
#include <vector>

#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/float_row.h"
#include "common/fp8.h"
#include "common/parallel_for.h"

namespace ltx {

void quantize_weights_check(const QuantizeWeightsParams& params) {
  constexpr const char* kOp = "quantize_weights";
  check_device(kOp, "w", params.w, params.w.device, "w");
  check_float_dtype(kOp, "w", params.w);
  check_rank(kOp, "w", params.w, 2);
  check_last_contiguous(kOp, "w", params.w);
  LTX_CHECK(params.block_size == kBlockSize,
            std::string(kOp) + ": block_size must be 128, got " + std::to_string(params.block_size));
  const float scale_max = static_cast<float>(params.scale_max);
  LTX_CHECK(scale_max > 0.0f && scale_max <= kFp8Max,
            std::string(kOp) + ": scale_max must be > 0 and at most 448, got " + number_to_string(params.scale_max));
}

void quantize_weights_cpu(const QuantizeWeightsParams& params) {
  quantize_weights_check(params);
  const int64_t out = params.w.size(0);
  const int64_t in = params.w.size(1);
  const int64_t tiles_across = num_blocks(in);
  const int64_t tiles = num_blocks(out) * tiles_across;
  const auto scale_max = static_cast<float>(params.scale_max);
  parallel_for(tiles, out * in, [&](int64_t begin, int64_t end) {
    std::vector<float> tile(kBlockSize * kBlockSize);
    for (int64_t tile_idx = begin; tile_idx < end; ++tile_idx) {
      const int64_t first_row = tile_idx / tiles_across * kBlockSize;
      const int64_t first_column = tile_idx % tiles_across * kBlockSize;
      const int64_t rows = std::min(kBlockSize, out - first_row);
      const int64_t columns = std::min(kBlockSize, in - first_column);
      for (int64_t row = 0; row < rows; ++row) {
        load_row(params.w, (first_row + row) * params.w.stride(0) + first_column, columns, &tile[row * columns]);
      }
      const BlockScale scale = block_scale(amax_bits(tile.data(), rows * columns), scale_max);
      for (int64_t row = 0; row < rows; ++row) {
        auto* q = static_cast<uint8_t*>(params.q.data) + (first_row + row) * in + first_column;
        encode_block(&tile[row * columns], columns, scale, q);
      }
      static_cast<float*>(params.scales.data)[tile_idx] = scale.scale;
    }
  });
}

}  // namespace ltx
