#pragma once

#include <algorithm>
#include <bit>
#include <string>

#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/cuda/lane.h"
#include "common/cuda/launch.h"

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

// scale_max 448: the multiplier is 0 in a poisoned block and in no other.
__device__ inline BlockScale block_scale(float amax, float scale_max) {
  const bool poisoned = !(amax < __uint_as_float(kInfinityBits));
  const float amax_c = fmaxf(amax, kSmallestAmax);
  return {.multiplier = poisoned ? 0.0f : __fdiv_rn(scale_max, amax_c),
          .scale = poisoned ? __uint_as_float(kQuietNanBits) : __fdiv_rn(amax_c, scale_max)};
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

// X: how x was read. Quantizes columns [column, column + 8) of kRows rows from `row` on, a multiple of kRows: 1, 2
// or 4. All threads of a warp call it, each group of 16 with neighbouring columns that are one block, and zeros in v
// for what is outside x. Each group ends up with the largest magnitude of row i in its lanes i, i + kRows, ...: rows
// are halved among the lanes for as long as there are several, so that a lane divides for one row alone and the scales
// of neighbouring rows, which are neighbours in memory, go out together. The last rows' lanes write the padding of the
// scales too.
template <class X, int kRows>
__device__ void quantize_lanes(const QuantizedRows& to, int64_t row, int64_t column,
                               const float (&v)[kRows][kLaneValues]) {
  constexpr unsigned kAllLanes = 0xFFFFFFFF;
  const int lane = static_cast<int>(threadIdx.x) % kBlockLanes;
  float amax[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) amax[r] = larger_magnitude(amax[r], v[r][i]);
  }
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int r = 0; r < half; ++r) {
      const float kept = upper ? amax[r + half] : amax[r];
      const float sent = upper ? amax[r] : amax[r + half];
      amax[r] = larger_magnitude(kept, __shfl_xor_sync(kAllLanes, sent, half));
    }
  }
#pragma unroll
  for (int distance = kRows; distance < kBlockLanes; distance *= 2) {
    amax[0] = larger_magnitude(amax[0], __shfl_xor_sync(kAllLanes, amax[0], distance));
  }
  const BlockScale own = block_scale(amax[0], kFp8Max);

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float multiplier = kRows > 1 ? __shfl_sync(kAllLanes, own.multiplier, r, kBlockLanes) : own.multiplier;
    if (row + r < to.rows) {
      const Packed<__nv_fp8_e4m3, kLaneValues> q = encode_lane(v[r], multiplier, multiplier == 0.0f);
      store_lane<X>(to.q, (row + r) * to.hidden + column, to.hidden - column, q);
    }
  }
  const int64_t block = column / kBlockSize;
  const bool ends = row + kRows >= to.rows && lane < 4;
  if (block * kBlockSize < to.hidden && (lane < kRows || ends) && row + lane < to.padded_rows) {
    to.scales[block * to.padded_rows + row + lane] = row + lane < to.rows ? own.scale : 0.0f;
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

// The first row and column of this thread, perhaps outside of x.
struct TilePosition {
  int64_t row;
  int64_t column;
};

__device__ inline TilePosition tile_position() {
  const int64_t group = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  return {.row = group * kTileRows, .column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kLaneValues};
}

}  // namespace ltx
