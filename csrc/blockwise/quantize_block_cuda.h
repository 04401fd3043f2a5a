#pragma once

#include <algorithm>
#include <bit>
#include <optional>
#include <string>

#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/cuda/lane.h"
#include "common/cuda/launch.h"
#include "common/rows.h"

// How the quantizing kernels end: the rules of quantize_block.h for values in registers. The 128 columns of a block lie
// over 16 neighbouring lanes, eight in each.
namespace ltx {

inline constexpr int kBlockLanes = static_cast<int>(kBlockSize) / kLaneValues;

// Where a kernel writes to.
struct QuantizedRows {
  __nv_fp8_e4m3* q;  // [rows, hidden] contiguous
  float* scales;     // [num_blocks(hidden)][padded_rows(rows)]
  int64_t rows;
  int64_t hidden;
  int64_t padded_rows;
};

inline QuantizedRows quantized_rows(const TensorView& q, const TensorView& scales) {
  return {.q = static_cast<__nv_fp8_e4m3*>(q.data),
          .scales = static_cast<float*>(scales.data),
          .rows = scales.size(0),
          .hidden = q.size(-1),
          .padded_rows = padded_rows(scales.size(0))};
}

// The larger magnitude, in the order of the bit patterns: NaN wins, as a NaN.
__device__ inline float larger_magnitude(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
}

// For scale_max 448: the multiplier is 0 in a poisoned block and in no other. Both quotients are correctly rounded, and
// without the branches that a division of any two numbers has: docs/numerics.md says why.
__device__ inline BlockScale block_scale(float amax) {
  constexpr float kInverseMax = 1.0f / kFp8Max;
  const bool poisoned = !(amax < __uint_as_float(kInfinityBits));
  const float amax_c = fmaxf(amax, kSmallestAmax);
  float scale = __fmul_rn(amax_c, kInverseMax);
  scale = __fmaf_rn(__fmaf_rn(-scale, kFp8Max, amax_c), kInverseMax, scale);
  // An eighth of both: the reciprocal of the largest amax is subnormal.
  const float divisor = __fmul_rn(amax_c, 0.125f);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
  float multiplier = __fmul_rn(inverse, kFp8Max / 8);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    multiplier = __fmaf_rn(__fmaf_rn(-multiplier, divisor, kFp8Max / 8), inverse, multiplier);
  }
  return {.multiplier = poisoned ? 0.0f : multiplier, .scale = poisoned ? __uint_as_float(kQuietNanBits) : scale};
}

// To e4m3: unless the block is poisoned, value * multiplier is finite, so that satfinite meets no infinity.
__device__ inline Packed<__nv_fp8_e4m3, kLaneValues> encode_lane(const float (&values)[kLaneValues], float multiplier,
                                                                 bool poisoned) {
  Packed<__nv_fp8_e4m3, kLaneValues> q;
#pragma unroll
  for (int i = 0; i < kLaneValues / 4; ++i) {
    const float* v = values + 4 * i;
    const float2 low = {__fmul_rn(v[0], multiplier), __fmul_rn(v[1], multiplier)};
    const float2 high = {__fmul_rn(v[2], multiplier), __fmul_rn(v[3], multiplier)};
    const uint32_t word = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
                          __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3) << 16;
    q.words[i] = poisoned ? 0 : word;
  }
  return q;
}

// X: how x was read. Quantizes kRows rows from `row` on, of which `rows` are in x, each in kLanes lanes: columns
// [column, column + 8) and those lane_step further on. All threads of a warp call it, each group of 16 with
// neighbouring columns that are one block, and zeros in v for what is outside x, or NaN where the row in x is NaN. A
// group holds a piece of kPieces blocks, at most 4. Its lanes p, p + kPieces, ... end up with the largest magnitude of
// block p: the blocks are halved among the lanes for as long as there are several, so that a lane divides for one block
// alone and the scales of neighbouring rows, which are neighbours in memory, go out together. The group of the last row
// writes the padding of the scales too.
template <class X, int kRows, int kLanes>
__device__ void quantize_lanes(const QuantizedRows& to, LaneIndex<X> row, int rows, LaneIndex<X> column, int lane_step,
                               const float (&v)[kLanes][kRows][kLaneValues]) {
  constexpr unsigned kAllLanes = 0xFFFFFFFF;
  constexpr int kPieces = kRows * kLanes;
  const int lane = static_cast<int>(threadIdx.x % kBlockLanes);
  float amax[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const float (&values)[kLaneValues] = v[p / kRows][p % kRows];
    amax[p] = larger_magnitude(values[0], values[1]);
#pragma unroll
    for (int i = 2; i < kLaneValues; ++i) amax[p] = larger_magnitude(amax[p], values[i]);
  }
#pragma unroll
  for (int half = kPieces / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int p = 0; p < half; ++p) {
      const float kept = upper ? amax[p + half] : amax[p];
      const float sent = upper ? amax[p] : amax[p + half];
      amax[p] = larger_magnitude(kept, __shfl_xor_sync(kAllLanes, sent, half));
    }
  }
#pragma unroll
  for (int distance = kPieces; distance < kBlockLanes; distance *= 2) {
    amax[0] = larger_magnitude(amax[0], __shfl_xor_sync(kAllLanes, amax[0], distance));
  }
  const BlockScale own = block_scale(amax[0]);

  const auto hidden = static_cast<LaneIndex<X>>(to.hidden);
  const auto padded = static_cast<LaneIndex<X>>(to.padded_rows);
  const int left = values_left(to.hidden, column);
  __nv_fp8_e4m3* const first_q = to.q + static_cast<uint64_t>(row) * hidden + column;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    __nv_fp8_e4m3* const row_q = first_q + r * static_cast<uint64_t>(hidden);
#pragma unroll
    for (int l = 0; l < kLanes; ++l) {
      const int piece = l * kRows + r;
      const float multiplier =
          kPieces > 1 ? __shfl_sync(kAllLanes, own.multiplier, piece, kBlockLanes) : own.multiplier;
      const Packed<__nv_fp8_e4m3, kLaneValues> q = encode_lane(v[l][r], multiplier, multiplier == 0.0f);
      if (r < rows) store_lane<X>(row_q + l * lane_step, left - l * lane_step, q);
    }
  }

  // Lane l * kRows + r has the scale of row r in the group's block l, if that has columns in x.
  const int block_left = left + lane * kLaneValues;
  float* const first_scale = to.scales + static_cast<uint64_t>(column) / kBlockSize * padded + row;
  const int64_t scale_step = lane_step / static_cast<int>(kBlockSize) * to.padded_rows;
  if (lane < kPieces && lane % kRows < rows && block_left > lane / kRows * lane_step) {
    first_scale[lane / kRows * scale_step + lane % kRows] = own.scale;
  }
  if (row + rows == to.rows && row + rows + lane < to.padded_rows) {
#pragma unroll
    for (int l = 0; l < kLanes; ++l) {
      if (block_left > l * lane_step) first_scale[l * scale_step + rows + lane] = 0.0f;
    }
  }
}

// The ops that need no sum over a row work in tiles: a thread owns the same eight columns of kTileRows rows, a block of
// threads up to 2048 columns of such a group of rows, or more groups where rows are short. Threads share nothing but
// what shuffles.
inline constexpr int kTileRows = 4;
inline constexpr int kTileThreads = 256;

struct TileGrid {
  dim3 blocks;
  dim3 threads;
};

inline TileGrid tile_grid(const char* op, int64_t rows, int64_t hidden) {
  constexpr int64_t kMaxGridYZ = 65535;
  const auto across = static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(num_blocks(hidden), kTileThreads / kBlockLanes))));
  const int64_t down = kTileThreads / kBlockLanes / across;
  const int64_t groups = (rows + kTileRows * down - 1) / (kTileRows * down);
  const int64_t z = (groups + kMaxGridYZ - 1) / kMaxGridYZ;
  LTX_CHECK(z <= kMaxGridYZ, std::string(op) + ": x must have at most " +
                                 std::to_string(kMaxGridYZ * kMaxGridYZ * kTileRows * down) + " rows, got " +
                                 std::to_string(rows));
  return {.blocks = dim3(static_cast<unsigned>((num_blocks(hidden) + across - 1) / across),
                         static_cast<unsigned>((groups + z - 1) / z), static_cast<unsigned>(z)),
          .threads = dim3(static_cast<unsigned>(across * kBlockLanes), static_cast<unsigned>(down))};
}

// What this thread owns, perhaps nothing. X: how x is read.
template <class X>
struct Tile {
  LaneIndex<X> row;
  int rows;  // in x
  LaneIndex<X> column;
  int left;  // values of a row from there on
};

template <class X>
__device__ Tile<X> locate_tile(int64_t rows, int64_t hidden) {
  using Index = LaneIndex<X>;
  const Index group = (Index{blockIdx.z} * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  const Index row = group * kTileRows;
  const Index column = (Index{blockIdx.x} * blockDim.x + threadIdx.x) * kLaneValues;
  const auto left = static_cast<std::make_signed_t<Index>>(static_cast<Index>(rows) - row);
  return {.row = row,
          .rows = max(0, static_cast<int>(min(left, std::make_signed_t<Index>{kTileRows}))),
          .column = column,
          .left = values_left(hidden, column)};
}

// Where a tile's rows start in a tensor.
template <int kTensors, class X>
__device__ void tile_offsets(const ShortRows<kTensors>& rows, int tensor, const Tile<X>& tile,
                             int64_t (&offsets)[kTileRows]) {
  if (rows.outer == 1) {
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) offsets[r] = (tile.row + r) * rows.inner_strides[tensor];
  } else {
    const auto index = rows.index(static_cast<uint32_t>(tile.row));
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) offsets[r] = rows.offset(tensor, index, r);
  }
}

template <int kTensors, class X>
__device__ void tile_offsets(const Rows<kTensors>& rows, int tensor, const Tile<X>& tile,
                             int64_t (&offsets)[kTileRows]) {
#pragma unroll 1
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t offset = rows.offset(tensor, tile.row + r);
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) offsets[i] = i == r ? offset : offsets[i];
  }
}

// Whether tile_offsets can walk them, and Tile count them: up to 2^21 rows of the grid lie past the last.
template <int kTensors>
std::optional<ShortRows<kTensors>> tile_rows(const Rows<kTensors>& rows) {
  const std::optional<ShortRows<kTensors>> few = rows.count >> 30 == 0 ? short_rows(rows) : std::nullopt;
  return few && (few->outer == 1 || few->inner >= kTileRows) ? few : std::nullopt;
}

}  // namespace ltx
