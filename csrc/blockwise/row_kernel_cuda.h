#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "common/check.h"
#include "common/cuda/lane.h"
#include "common/cuda/launch.h"
#include "common/cuda/reduce.h"
#include "common/rows.h"

// What the kernels share in which a block owns a row: blockIdx says which row, and a thread holds kRowLanes lanes of
// it, neighbours of its neighbours' lanes, so that 16 threads hold a block of 128 columns.
namespace ltx {

inline constexpr int kRowLanes = 2;
inline constexpr int kMaxRowThreads = 512;

// Blocks in the shape of the rows, so that no thread divides.
template <int kTensors>
struct RowGrid {
  dim3 blocks;
  dim3 threads;
  ShortRows<kTensors> rows;
};

// Nothing if the rows do not fit a grid, or a row a block.
template <int kTensors>
std::optional<RowGrid<kTensors>> row_grid(const Rows<kTensors>& rows, int64_t hidden) {
  constexpr uint32_t kMaxGridX = 0x7FFFFFFF;
  constexpr uint32_t kMaxGridY = 0xFFFF;
  constexpr int64_t kWarpColumns = kWarpSize * kLaneValues * kRowLanes;
  const int64_t threads = (hidden + kWarpColumns - 1) / kWarpColumns * kWarpSize;
  const std::optional<ShortRows<kTensors>> few = short_rows(rows);
  if (!few || few->inner > kMaxGridX || few->outer > kMaxGridY || threads > kMaxRowThreads) return std::nullopt;
  return RowGrid<kTensors>{
      .blocks = dim3(few->inner, few->outer), .threads = dim3(static_cast<unsigned>(threads)), .rows = *few};
}

// As many blocks as rows or a few more.
inline dim3 scalar_row_blocks(const char* op, int64_t rows) {
  constexpr int64_t kMaxGridX = 0x7FFFFFFF;
  constexpr int64_t kMaxGridY = 0xFFFF;
  const int64_t y = (rows + kMaxGridX - 1) / kMaxGridX;
  LTX_CHECK(y <= kMaxGridY, std::string(op) + ": x must have at most " + std::to_string(kMaxGridX * kMaxGridY) +
                                " rows, got " + std::to_string(rows));
  return dim3(static_cast<unsigned>((rows + y - 1) / y), static_cast<unsigned>(y));
}

__device__ inline int64_t row_index() { return int64_t{blockIdx.y} * gridDim.x + blockIdx.x; }

template <int kTensors>
__device__ int64_t row_offset(const ShortRows<kTensors>& rows, int tensor) {
  return rows.offset(tensor, blockIdx.y, blockIdx.x);
}

// The first column of lane `i` of this thread.
__device__ inline int row_column(int i) { return static_cast<int>(i * blockDim.x + threadIdx.x) * kLaneValues; }

__device__ inline float sum_of_squares(const float (&values)[kLaneValues]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) sum += values[i] * values[i];
  return sum;
}

__device__ inline void clear(float (&values)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) values[i] = 0.0f;
}

}  // namespace ltx
