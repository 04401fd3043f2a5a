#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

// wgmma: a warpgroup multiplies e4m3 tiles in shared memory, asynchronously. Between start_mma and end_mma its calls
// belong to one group, and wait_for_mma waits for groups.
namespace ltx {

// Orders this thread's accesses to the accumulators before the wgmmas that follow.
__device__ inline void start_mma() { cute::warpgroup_arrive(); }
__device__ inline void end_mma() { cute::warpgroup_commit_batch(); }

// Until all but the last kPending groups are complete; `accumulator`, of a complete one, may then be read.
template <int kPending, int kSize>
__device__ __forceinline__ void wait_for_mma(float (&accumulator)[kSize]) {
  cute::warpgroup_wait<kPending>();
  // Keeps the compiler from moving reads of the accumulator above the wait.
#pragma unroll
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(accumulator[i]);
}

// The descriptor of a tile in shared memory that TMA has swizzled by 128 bytes: rows of 128 bytes, from a multiple of
// 1024 on. Adding bytes / 16 to it moves it: along a row within the swizzle, or by whole groups of 8 rows.
__device__ inline uint64_t mma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128Bytes = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * 128 / 16} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;  // the leading dimension's offset: a row is one swizzle wide
  return kSwizzle128Bytes | kEightRows | kUnused | (address & 0x3FFFF) >> 4;
}
constexpr uint64_t kMmaDescriptorUnit = 16;  // bytes

template <int kColumns>
struct MmaE4m3;
template <>
struct MmaE4m3<64> : cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<> {};
template <>
struct MmaE4m3<128> : cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<> {};

constexpr int kMmaDepth = 32;

// d = a b^T, or d += a b^T: 64 rows of a and kColumns of b, kMmaDepth bytes of each. Thread t has of row
// t / 32 * 16 + t % 32 / 4 + 8 h the columns 8 j + t % 4 * 2 + {0, 1} in d[4 j + 2 h + {0, 1}].
template <int kSize>
__device__ __forceinline__ void mma(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  using cute::SM90::GMMA::ScaleOut;
  [&]<size_t... i>(std::index_sequence<i...>) {
    MmaE4m3<2 * kSize>::fma(a, b, d[i]..., accumulate ? ScaleOut::One : ScaleOut::Zero);
  }(std::make_index_sequence<kSize>{});
}

}  // namespace ltx
