#pragma once

#include "blockwise/fp8_gemm/fp8_gemm_config.h"

// Which thread of fp8_gemm_sm89.cu copies, loads and stores what, and where it lies in shared memory. For the kernel,
// and for tests that need no GPU.
//
// A stage holds rows of 128 bytes of a and of b, each in 8 chunks of 16. The chunks of a row are swizzled, so that the
// 8 rows of a matrix that ldmatrix loads, one chunk of each, lie in different banks.
//
// Two neighbouring mma together have 16 columns of out, that is 16 rows of b. Which columns each has is free: here a
// lane gets four neighbours, so that a row's four lanes store 32 bytes side by side, a whole sector, in 16-bit dtypes.
namespace ltx {

inline constexpr int kSm89RowBytes = static_cast<int>(kBlockSize);
inline constexpr int kSm89ChunkBytes = 16;
inline constexpr int kSm89RowChunks = kSm89RowBytes / kSm89ChunkBytes;

// A warp multiplies kMmaRows x kMmaColumns, kMmaBytes along k, at a time; kPairColumns with two mma.
inline constexpr int kSm89MmaRows = 16;
inline constexpr int kSm89PairColumns = 16;
inline constexpr int kSm89MmaBytes = 32;

// A warp's part of a tile. The larger one reads less shared memory a product, and has registers for no more.
inline constexpr int kSm89WarpColumns = 32;
constexpr int sm89_warp_rows(const Fp8GemmConfig& config) {
  return config.tile_m * config.tile_n >= 128 * 128 ? 64 : 32;
}
constexpr int sm89_threads(const Fp8GemmConfig& config) {
  return config.tile_m / sm89_warp_rows(config) * (config.tile_n / kSm89WarpColumns) * 32;
}

struct Sm89Place {
  int row;
  int column;
  bool operator==(const Sm89Place&) const = default;
};

// In a tile: the part of a warp, of whose kind `warps_n` lie side by side.
constexpr Sm89Place sm89_warp_place(int warp, int warps_n, int warp_rows) {
  return {warp / warps_n * warp_rows, warp % warps_n * kSm89WarpColumns};
}

// In bytes from the start of a's and b's part of a stage. Both have a period of 16 rows.
constexpr int sm89_a_offset(int row, int chunk) { return row * kSm89RowBytes + (chunk ^ row % 8) * kSm89ChunkBytes; }
constexpr int sm89_b_offset(int row, int chunk) {
  return row * kSm89RowBytes + (chunk ^ (row % 2 + row / 4 % 4 * 2)) * kSm89ChunkBytes;
}

// Row and chunk of the first that a thread copies. The others are of the same chunk, sm89_copy_rows further each.
constexpr Sm89Place sm89_copy_place(int thread) { return {thread / kSm89RowChunks, thread % kSm89RowChunks}; }
constexpr int sm89_copy_rows(const Fp8GemmConfig& config) { return sm89_threads(config) / kSm89RowChunks; }

// Row and chunk whose address a lane gives ldmatrix, for 16 rows of a, and for the 16 rows of b of two mma.
constexpr Sm89Place sm89_a_lane(int lane) { return {lane % 16, lane / 16}; }
constexpr Sm89Place sm89_b_lane(int lane) {
  const int mma = lane / 16;
  const int column = lane % 8;  // of the mma
  return {column / 2 * 4 + mma * 2 + column % 2, lane / 8 % 2};
}
// The address of the same row `step` * kSm89MmaBytes further along k: those are bits that the swizzle has XORed.
template <class Address>
constexpr Address sm89_step(Address address, int step) {
  return address ^ static_cast<Address>(step * kSm89MmaBytes);
}

// In the 16 x 16 of two mma: the first of the four neighbours in row half `half` (0, 1) that a lane has. The first mma
// has two of them, the second one the others, each in [2 * half + {0, 1}].
constexpr Sm89Place sm89_out_lane(int lane, int half) { return {lane / 4 + half * 8, lane % 4 * 4}; }

}  // namespace ltx
