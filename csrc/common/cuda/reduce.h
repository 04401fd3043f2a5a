#pragma once

namespace ltx {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxWarps = 32;  // of a block

template <int kCount>
struct BlockSumShared {
  float partial[kCount][kMaxWarps];
};

// Adds each of `values` over all threads of the block, whose size is a multiple of 32; every thread gets the sums, in
// an order that depends on the block size alone. One barrier.
template <int kCount>
__device__ void block_sum(float (&values)[kCount], BlockSumShared<kCount>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      values[i] += __shfl_xor_sync(0xFFFFFFFF, values[i], distance);
    }
    if (lane == 0) shared.partial[i][warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = 0.0f;
    for (int other = 0; other < num_warps; ++other) values[i] += shared.partial[i][other];
  }
}

// For at most 16 warps, all of whose partial sums a half warp reads at once.
inline constexpr int kSpreadWarps = 16;

template <int kCount>
struct SpreadSumShared {
  float partial[kCount][kSpreadWarps];
};

// The same sums in fewer instructions, for a block that adds again and again: it keeps two of `shared`, which it uses
// in turn, so that one barrier a time will do. Entries of warps that it lacks must be 0.
template <int kCount>
__device__ void spread_sum(float (&values)[kCount], SpreadSumShared<kCount>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      values[i] += __shfl_xor_sync(0xFFFFFFFF, values[i], distance);
    }
    if (lane == 0) shared.partial[i][warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = shared.partial[i][lane % kSpreadWarps];
#pragma unroll
    for (int distance = kSpreadWarps / 2; distance > 0; distance /= 2) {
      values[i] += __shfl_xor_sync(0xFFFFFFFF, values[i], distance);
    }
  }
}

}  // namespace ltx
