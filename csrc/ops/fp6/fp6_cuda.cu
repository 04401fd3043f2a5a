#include "ops/fp6/fp6.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "common/cuda/launch.h"
#include "common/cuda/reduce.h"
#include "common/fp6.h"
#include "ops/fp6/fp6_words.h"

// Four e4m3 bytes, or the three that they become, are a group. A warp owns a tile of up to 512 groups of one row, 2048
// and 1536 bytes; warps share nothing. It moves both sides in 16-byte vectors that are consecutive over its lanes, four
// and three a lane, and holds all that it loads in registers before it uses any. Between the two orders the packed side
// passes through shared memory, by words of which a lane has three next to each other: 3 and 32 have no common factor,
// so the lanes of an access meet 32 different banks. Two warp barriers a tile. What is left after the last 16 groups,
// and all of a tile that is not aligned to 16 bytes on both sides, goes by bytes, a group a lane.
namespace ltx {

namespace {

constexpr int kWarps = 4;
constexpr int kE4m3Group = 4;  // bytes of a group
constexpr int kPackedGroup = 3;
constexpr int kUnitGroups = 16;  // the fewest groups that are whole 16-byte vectors on both sides,
constexpr int kE4m3Vectors = 4;  // namely as many as a group has bytes
constexpr int kPackedVectors = 3;
constexpr int kTileGroups = kWarpSize * kUnitGroups;

struct PackedTile {
  uint4 vectors[kPackedVectors * kWarpSize];

  // The words that the 16 e4m3 bytes `vector` of the tile become.
  __device__ uint32_t* words(int vector) { return reinterpret_cast<uint32_t*>(vectors) + 3 * vector; }
};

struct Matrix {
  const uint8_t* x;
  uint8_t* out;    // contiguous
  int64_t groups;  // of a row
  int64_t x_stride;
  int64_t row_tiles;
  int64_t num_tiles;
};

struct Tile {
  const uint8_t* x;
  uint8_t* out;
  int groups;
  int units;  // that vectors move; the groups after them go one by one
};

template <int kXGroup, int kOutGroup>
__device__ Tile locate(const Matrix& matrix, int64_t tile_idx) {
  const int64_t row = matrix.row_tiles == matrix.num_tiles ? 0 : tile_idx / matrix.row_tiles;
  const int64_t first = (tile_idx - row * matrix.row_tiles) * kTileGroups;
  Tile tile;
  tile.x = matrix.x + row * matrix.x_stride + first * kXGroup;
  tile.out = matrix.out + (row * matrix.groups + first) * kOutGroup;
  tile.groups = static_cast<int>(min(int64_t{kTileGroups}, matrix.groups - first));
  const bool aligned = (reinterpret_cast<uintptr_t>(tile.x) | reinterpret_cast<uintptr_t>(tile.out)) % 16 == 0;
  tile.units = aligned ? tile.groups / kUnitGroups : 0;
  return tile;
}

__global__ void __launch_bounds__(kWarps* kWarpSize) fp6_pack_kernel(Matrix matrix) {
  __shared__ PackedTile packed_tiles[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  PackedTile& packed = packed_tiles[warp];
  for (int64_t idx = int64_t{blockIdx.x} * kWarps + warp; idx < matrix.num_tiles; idx += int64_t{gridDim.x} * kWarps) {
    const Tile tile = locate<kE4m3Group, kPackedGroup>(matrix, idx);
    const uint4* x = reinterpret_cast<const uint4*>(tile.x);
    uint4* out = reinterpret_cast<uint4*>(tile.out);

    uint4 e4m3[kE4m3Vectors] = {};
#pragma unroll
    for (int i = 0; i < kE4m3Vectors; ++i) {
      const int vector = i * kWarpSize + lane;
      if (vector < tile.units * kE4m3Vectors) e4m3[i] = x[vector];
    }
    __syncwarp();  // every lane has read the tile before; and no load may sink below, where it would wait alone

#pragma unroll
    for (int i = 0; i < kE4m3Vectors; ++i) {
      const auto words = pack_fp6_words(std::bit_cast<std::array<uint32_t, 4>>(e4m3[i]));
      for (int j = 0; j < 3; ++j) packed.words(i * kWarpSize + lane)[j] = words[j];
    }
    __syncwarp();  // every lane's words are written before any lane reads vectors

#pragma unroll
    for (int i = 0; i < kPackedVectors; ++i) {
      const int vector = i * kWarpSize + lane;
      if (vector < tile.units * kPackedVectors) out[vector] = packed.vectors[vector];
    }

#pragma unroll 1
    for (int group = tile.units * kUnitGroups + lane; group < tile.groups; group += kWarpSize) {
      pack_fp6(tile.x + group * kE4m3Group, tile.out + group * kPackedGroup);
    }
  }
}

__global__ void __launch_bounds__(kWarps* kWarpSize) fp6_unpack_kernel(Matrix matrix) {
  __shared__ PackedTile packed_tiles[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  PackedTile& packed = packed_tiles[warp];
  for (int64_t idx = int64_t{blockIdx.x} * kWarps + warp; idx < matrix.num_tiles; idx += int64_t{gridDim.x} * kWarps) {
    const Tile tile = locate<kPackedGroup, kE4m3Group>(matrix, idx);
    const uint4* x = reinterpret_cast<const uint4*>(tile.x);
    uint4* out = reinterpret_cast<uint4*>(tile.out);

    uint4 loaded[kPackedVectors] = {};
#pragma unroll
    for (int i = 0; i < kPackedVectors; ++i) {
      const int vector = i * kWarpSize + lane;
      if (vector < tile.units * kPackedVectors) loaded[i] = x[vector];
    }
    __syncwarp();  // every lane has read the tile before; and no load may sink below, where it would wait alone

#pragma unroll
    for (int i = 0; i < kPackedVectors; ++i) packed.vectors[i * kWarpSize + lane] = loaded[i];
    __syncwarp();  // every lane's vectors are written before any lane reads words

#pragma unroll
    for (int i = 0; i < kE4m3Vectors; ++i) {
      const int vector = i * kWarpSize + lane;
      const uint32_t* words = packed.words(vector);
      const auto e4m3 = unpack_fp6_words({words[0], words[1], words[2]});
      if (vector < tile.units * kE4m3Vectors) out[vector] = std::bit_cast<uint4>(e4m3);
    }

#pragma unroll 1
    for (int group = tile.units * kUnitGroups + lane; group < tile.groups; group += kWarpSize) {
      unpack_fp6(tile.x + group * kPackedGroup, tile.out + group * kE4m3Group);
    }
  }
}

void launch(const char* op, void (*kernel)(Matrix), const TensorView& x, const TensorView& out, int64_t groups,
            Stream stream) {
  int64_t rows = x.size(0);
  if (rows == 0 || groups == 0) return;
  if (x.stride(0) == x.size(1)) {  // no gap between rows: one long row, with at most one end that is no whole tile
    groups *= rows;
    rows = 1;
  }
  const int64_t row_tiles = (groups + kTileGroups - 1) / kTileGroups;
  const Matrix matrix{.x = static_cast<const uint8_t*>(x.data),
                      .out = static_cast<uint8_t*>(out.data),
                      .groups = groups,
                      .x_stride = x.stride(0),
                      .row_tiles = row_tiles,
                      .num_tiles = rows * row_tiles};
  const int64_t blocks = std::min<int64_t>((matrix.num_tiles + kWarps - 1) / kWarps, std::numeric_limits<int>::max());
  kernel<<<static_cast<unsigned>(blocks), kWarps * kWarpSize, 0, stream>>>(matrix);
  LTX_CUDA_CHECK(cudaGetLastError(), op);
}

}  // namespace

void fp6_pack_cuda(const Fp6PackParams& params, Stream stream) {
  fp6_pack_check(params);
  launch("fp6_pack", fp6_pack_kernel, params.x, params.out, params.x.size(1) / kE4m3Group, stream);
}

void fp6_unpack_cuda(const Fp6UnpackParams& params, Stream stream) {
  fp6_unpack_check(params);
  launch("fp6_unpack", fp6_unpack_kernel, params.x, params.out, params.original_n / kE4m3Group, stream);
}

}  // namespace ltx
