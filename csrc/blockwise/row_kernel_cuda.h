#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "common/check.h"
#include "common/cuda/lane.h"
#include "common/cuda/launch.h"
#include "common/cuda/reduce.h"
#include "common/rows.h"

// What the kernels share in which a block owns a row, or kRows of them: blockIdx says which, and a thread holds kLanes
// lanes of each, neighbours of its neighbours' lanes, so that 16 threads hold a block of 128 columns.
namespace ltx {

// Blocks in the shape of the rows, so that no thread divides.
template <int kTensors>
struct RowGrid {
  dim3 blocks;
  dim3 threads;
  ShortRows<kTensors> rows;
};

// Nothing if the rows do not fit a grid, or a row not a block.
template <int kRows, int kLanes, int kTensors>
std::optional<RowGrid<kTensors>> row_grid(const Rows<kTensors>& rows, int64_t hidden, int max_threads) {
  constexpr uint32_t kMaxGridX = 0x7FFFFFFF;
  constexpr uint32_t kMaxGridY = 0xFFFF;
  constexpr int64_t kWarpColumns = kWarpSize * kLaneValues * kLanes;
  const int64_t threads = (hidden + kWarpColumns - 1) / kWarpColumns * kWarpSize;
  const std::optional<ShortRows<kTensors>> few = short_rows(rows);
  if (!few || few->inner > kMaxGridX || few->outer > kMaxGridY || threads > max_threads) return std::nullopt;
  return RowGrid<kTensors>{.blocks = dim3((few->inner + kRows - 1) / kRows, few->outer),
                           .threads = dim3(static_cast<unsigned>(threads)),
                           .rows = *few};
}

// The rows of a block: those of an outer index, so that an outer index may end in fewer.
struct BlockRows {
  uint32_t outer;
  uint32_t inner;
  int count;
  uint32_t row;
};

template <int kRows, int kTensors>
__device__ BlockRows block_rows(const ShortRows<kTensors>& rows) {
  const uint32_t inner = blockIdx.x * kRows;
  return {.outer = blockIdx.y,
          .inner = inner,
          .count = static_cast<int>(min(uint32_t{kRows}, rows.inner - inner)),
          .row = blockIdx.y * rows.inner + inner};
}

// From a lane of a thread to its next, in columns, and where its first starts.
__device__ inline int lane_step() { return static_cast<int>(blockDim.x) * kLaneValues; }
__device__ inline int first_column() { return static_cast<int>(threadIdx.x) * kLaneValues; }

inline constexpr int kScalarRowThreads = 512;

// A block for each row, and perhaps a few more.
inline dim3 scalar_row_blocks(const char* op, int64_t rows) {
  constexpr int64_t kMaxGridX = 0x7FFFFFFF;
  constexpr int64_t kMaxGridY = 0xFFFF;
  const int64_t y = (rows + kMaxGridX - 1) / kMaxGridX;
  LTX_CHECK(y <= kMaxGridY, std::string(op) + ": x must have at most " + std::to_string(kMaxGridX * kMaxGridY) +
                                " rows, got " + std::to_string(rows));
  return dim3(static_cast<unsigned>((rows + y - 1) / y), static_cast<unsigned>(y));
}

// The row of a block of that grid, perhaps none.
__device__ inline int64_t scalar_row() { return int64_t{blockIdx.y} * gridDim.x + blockIdx.x; }

__device__ inline float sum_of_squares(const float (&values)[kLaneValues]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) sum = __fmaf_rn(values[i], values[i], sum);
  return sum;
}

}  // namespace ltx
