#pragma once

#include <cstdint>
#include <vector>

#include "blockwise/fp8_gemm/fp8_gemm.h"
#include "blockwise/quantize_block.h"

// The inner part of the CPU backend, compiled for several instruction sets: the sums over one k block of a tile. The
// product of two e4m3 values is exact in fp32, so a fused multiply-add gives the bits of a multiplication and an
// addition; each sum runs along k in order. Thus all kernels agree bit for bit (but for the sign of a NaN).
namespace ltx {

inline constexpr int64_t kTileRows = 128;
inline constexpr int64_t kTileColumns = kBlockSize;  // one scale of b a tile
inline constexpr int64_t kTileDepth = kBlockSize;

struct Fp8GemmBlock {
  const uint8_t* a;  // [rows, depth] e4m3
  int64_t a_stride;  // bytes from row to row
  int64_t rows;      // 1 to kTileRows
  const uint8_t* b;  // [columns, depth] e4m3 or packed fp6
  int64_t b_stride;
  int64_t columns;  // a multiple of 8 up to kTileColumns
  bool b_is_fp6;
  int64_t depth;  // a multiple of 16 up to kTileDepth
};

struct alignas(64) Fp8GemmScratch {
  float sums[kTileRows * kTileColumns];  // the result: [rows, kTileColumns]
  float a[kTileRows * kTileDepth];       // decoded
  float b[kTileDepth * kTileColumns];    // decoded, a panel of columns after the other, each [depth, panel]
  uint8_t b_codes[kTileColumns * kTileDepth];
};

struct Fp8GemmBlockKernel {
  const char* name;
  void (*sum)(const Fp8GemmBlock& block, Fp8GemmScratch& scratch);
};

// Those that this CPU can run, the fastest first.
const std::vector<Fp8GemmBlockKernel>& fp8_gemm_block_kernels();

// fp8_gemm_cpu with a kernel of the caller's choice, for tests.
void fp8_gemm_cpu_by(const Fp8GemmBlockKernel& kernel, const Fp8GemmParams& params);

}  // namespace ltx
