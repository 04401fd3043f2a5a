#include "blockwise/fp8_gemm/fp8_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "blockwise/fp8_gemm/fp8_gemm_cuda.h"
#include "blockwise/fp8_gemm/fp8_gemm_round.h"
#include "blockwise/fp8_gemm/fp8_gemm_sm89_layout.h"
#include "common/cuda/async_copy.h"
#include "common/cuda/launch.h"
#include "common/cuda/mma_sm89.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector.h"
#include "common/fp6.h"

// A block computes one tile of out. All its threads copy the k blocks of a, b and a_scales into a ring of stages, by
// cp.async, and each warp multiplies its part of the tile out of them: ldmatrix, mma, and every k block's sums, scaled,
// are added to accumulators in registers. One barrier a k block. fp8_gemm_sm89_layout.h says who has what.
namespace ltx {

namespace {

// The configuration is an index: nvcc 13.0 compiles no kernel with a template argument of class type.
template <size_t kCandidate, class T, bool kHalfSums>
struct TilingOf {
  using Out = T;
  using MmaSums = std::conditional_t<kHalfSums, uint32_t[2], float[4]>;  // of a lane, over a k block
  static constexpr Fp8GemmConfig kConfig = kFp8GemmSm89Candidates[kCandidate].config;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kThreads = sm89_threads(kConfig);
  static constexpr int kWarpRows = sm89_warp_rows(kConfig);
  static constexpr int kMmasM = kWarpRows / kSm89MmaRows;  // of a warp
  static constexpr int kPairsN = kSm89WarpColumns / kSm89PairColumns;
  static_assert(kTileN <= kBlockSize && kBlockSize % kTileN == 0);  // one scale of b a k block
  static_assert(kTileM / 4 <= kThreads);                            // a thread copies at most four of a_scales

  struct Stage {
    uint8_t a[kTileM * kSm89RowBytes];
    uint8_t b[kTileN * kSm89RowBytes];
    float a_scales[kTileM];
  };
  struct alignas(128) Shared {
    Stage stages[kStages];
  };
  static_assert(sizeof(Shared) == fp8_gemm_sm89_shared_bytes(kConfig) && sizeof(Shared) <= kSm89SharedBytes);
  static_assert(sizeof(Stage) % kSm89RowBytes == 0);  // sm89_step changes bits below that
};

// Why half precision can hold the sums over a k block if b is fp6: whatever their order, none is larger than this, so
// none overflows; and as all products are multiples of 2^-9 * 2^-9, the steps of the smallest e4m3 values, which halves
// have down to 2^-24, none is lost below them. What they cost is that each addition rounds to 11 bits.
static_assert(kBlockSize * 448 * kFp6Max < 65504);

struct Args {
  const uint8_t* a;  // [m, k]
  const uint8_t* b;  // [n, k]
  int64_t a_stride;
  int64_t b_stride;
  const float* a_scales;  // [m, k_blocks], column-major
  int64_t a_scales_stride;
  const void* b_scales;  // [ceil(n / 128), k_blocks]
  DType b_scales_dtype;
  int64_t b_scales_row_stride;
  int64_t b_scales_column_stride;
  const float* bias;     // [n], or nullptr
  const void* residual;  // [m, n] of out's dtype, or nullptr
  int64_t residual_stride;
  bool residual_in_fours;  // four neighbours may be read in one access
  void* out;               // [m, n]
  int m;
  int n;
  int k;
  int k_blocks;
  int tiles_m;
  int tiles_n;
  int band;
};

// This thread's part of the copies into a stage.
template <class Tiling>
class Loader {
 public:
  __device__ Loader(const Args& args, const Sm89Place& tile)
      : args_(args),
        row_(tile.row + sm89_copy_place(threadIdx.x).row),
        column_(tile.column + sm89_copy_place(threadIdx.x).row),
        depth_(sm89_copy_place(threadIdx.x).column * kSm89ChunkBytes),
        scale_row_(tile.row + static_cast<int>(threadIdx.x) * 4),
        a_(args.a + row_ * args.a_stride + depth_),
        b_(args.b + column_ * args.b_stride + depth_),
        a_scales_(args.a_scales + scale_row_) {}

  // The next k block, if there is one.
  __device__ __forceinline__ void copy(uint32_t stage) {
    using Stage = typename Tiling::Stage;
    if (k_block_ < args_.k_blocks) {
      const auto [row, chunk] = sm89_copy_place(threadIdx.x);
      const bool in_k = k_block_ * kSm89RowBytes + depth_ < args_.k;
#pragma unroll
      for (int i = 0; i < Tiling::kTileM / kRows; ++i) {
        copy_16_bytes_async(stage + offsetof(Stage, a) + sm89_a_offset(row, chunk) + i * kRows * kSm89RowBytes,
                            a_ + i * kRows * args_.a_stride, in_k && row_ + i * kRows < args_.m ? 16 : 0);
      }
#pragma unroll
      for (int i = 0; i < Tiling::kTileN / kRows; ++i) {
        copy_16_bytes_async(stage + offsetof(Stage, b) + sm89_b_offset(row, chunk) + i * kRows * kSm89RowBytes,
                            b_ + i * kRows * args_.b_stride, in_k && column_ + i * kRows < args_.n ? 16 : 0);
      }
      if (threadIdx.x < Tiling::kTileM / 4) {
        copy_16_bytes_async(stage + offsetof(Stage, a_scales) + threadIdx.x * 16, a_scales_,
                            min(max(args_.m - scale_row_, 0), 4) * 4);
      }
      a_ += kSm89RowBytes;
      b_ += kSm89RowBytes;
      a_scales_ += args_.a_scales_stride;
      ++k_block_;
    }
    commit_copies();  // also an empty group: the wait counts them
  }

 private:
  static constexpr int kRows = sm89_copy_rows(Tiling::kConfig);
  static_assert(kRows % 16 == 0);  // the swizzles' period: all offsets are the first one and a constant

  const Args& args_;
  const int row_;     // of a
  const int column_;  // of out, a row of b
  const int depth_;   // in a k block
  const int scale_row_;
  const uint8_t* a_;
  const uint8_t* b_;
  const float* a_scales_;
  int k_block_ = 0;
};

// What a warp multiplies at a time, in the registers of a lane.
template <class Tiling>
struct Operands {
  uint32_t a[Tiling::kMmasM][4];
  uint32_t b[Tiling::kPairsN][4];

  __device__ __forceinline__ void load(uint32_t a_address, uint32_t b_address, int step) {
#pragma unroll
    for (int i = 0; i < Tiling::kMmasM; ++i) {
      load_matrices(a[i], sm89_step(a_address, step) + i * kSm89MmaRows * kSm89RowBytes);
    }
#pragma unroll
    for (int j = 0; j < Tiling::kPairsN; ++j) {
      load_matrices(b[j], sm89_step(b_address, step) + j * kSm89PairColumns * kSm89RowBytes);
    }
  }
};

// [rows of mma][pairs of mma][mma of the pair][as mma has them]
template <class Tiling>
using Sums = typename Tiling::MmaSums[Tiling::kMmasM][Tiling::kPairsN][2];
template <class Tiling>
using Acc = float[Tiling::kMmasM][Tiling::kPairsN][2][4];

// A k block: sums += a b^T. The next step's operands load while one multiplies.
template <class Tiling>
__device__ __forceinline__ void multiply_block(uint32_t a_address, uint32_t b_address, Sums<Tiling>& sums) {
  constexpr int kSteps = kSm89RowBytes / kSm89MmaBytes;
  Operands<Tiling> operands[2];
  operands[0].load(a_address, b_address, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) operands[(step + 1) % 2].load(a_address, b_address, step + 1);
    const Operands<Tiling>& now = operands[step % 2];
#pragma unroll
    for (int i = 0; i < Tiling::kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < Tiling::kPairsN; ++j) {
#pragma unroll
        for (int of_pair = 0; of_pair < 2; ++of_pair) {
          mma(sums[i][j][of_pair], now.a[i], now.b[j][2 * of_pair], now.b[j][2 * of_pair + 1]);
        }
      }
    }
  }
}

// acc += sums * (a_scales * b_scales), a fused multiply-add. a_scales: of this lane's first row.
template <class Tiling>
__device__ __forceinline__ void promote(const Sums<Tiling>& sums, const float* a_scales, float b_scale,
                                        Acc<Tiling>& acc) {
#pragma unroll
  for (int i = 0; i < Tiling::kMmasM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = a_scales[i * kSm89MmaRows + half * 8] * b_scale;
#pragma unroll
      for (int j = 0; j < Tiling::kPairsN; ++j) {
#pragma unroll
        for (int of_pair = 0; of_pair < 2; ++of_pair) {
#pragma unroll
          for (int c = 2 * half; c < 2 * half + 2; ++c) {
            acc[i][j][of_pair][c] += element(sums[i][j][of_pair], c) * scale;
          }
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void add_residual(const Args& args, int row, int column, float (&values)[4]) {
  const T* from = static_cast<const T*>(args.residual) + row * args.residual_stride + column;
  float residual[4];
  if (args.residual_in_fours) {
    unpack(load<T, 4>(from), residual);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) residual[c] = static_cast<float>(__ldg(from + c));
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) values[c] += residual[c];
}

// out = round((acc + bias) + residual) of four neighbours, all inside or all outside, as n is a multiple of 8.
template <class T>
__device__ __forceinline__ void store_four(const Args& args, int row, int column, float (&values)[4]) {
  if (args.bias != nullptr) {
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] += __ldg(args.bias + column + c);
  }
  if (args.residual != nullptr) add_residual<T>(args, row, column, values);
  Packed<T, 4> rounded;
#pragma unroll
  for (int c = 0; c < static_cast<int>(sizeof(rounded.words) / sizeof(uint32_t)); ++c) {
    if constexpr (sizeof(T) == 2) {
      rounded.words[c] = round_pair<T>(values[2 * c], values[2 * c + 1]);
    } else {
      rounded.words[c] = __float_as_uint(with_quiet_nan(values[c]));
    }
  }
  store(static_cast<T*>(args.out) + static_cast<int64_t>(row) * args.n + column, rounded);
}

template <class Tiling>
__device__ __forceinline__ void store_tile(const Args& args, const Sm89Place& first, int lane, Acc<Tiling>& acc) {
#pragma unroll
  for (int i = 0; i < Tiling::kMmasM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Sm89Place of_lane = sm89_out_lane(lane, half);
      const int row = first.row + i * kSm89MmaRows + of_lane.row;
#pragma unroll
      for (int j = 0; j < Tiling::kPairsN; ++j) {
        const int column = first.column + j * kSm89PairColumns + of_lane.column;
        if (row >= args.m || column >= args.n) continue;
        const float (&pair)[2][4] = acc[i][j];
        float values[4] = {pair[0][2 * half], pair[0][2 * half + 1], pair[1][2 * half], pair[1][2 * half + 1]};
        store_four<typename Tiling::Out>(args, row, column, values);
      }
    }
  }
}

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads) fp8_gemm_sm89_kernel(const __grid_constant__ Args args) {
  using Stage = typename Tiling::Stage;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const Fp8GemmTile tile_index = fp8_gemm_tile(static_cast<int>(blockIdx.x), args.tiles_m, args.tiles_n, args.band);
  const Sm89Place tile{tile_index.m * Tiling::kTileM, tile_index.n * Tiling::kTileN};
  const Sm89Place of_warp = sm89_warp_place(warp, Tiling::kTileN / kSm89WarpColumns, Tiling::kWarpRows);
  const uint32_t stages = shared_address(shared_memory);
  const auto next = [](int stage) { return stage + 1 == Tiling::kStages ? 0 : stage + 1; };

  let_next_kernel_start();
  wait_for_previous_kernel();
  Loader<Tiling> loader(args, tile);
#pragma unroll
  for (int i = 0; i < Tiling::kStages - 1; ++i) loader.copy(stages + i * static_cast<int>(sizeof(Stage)));

  const Sm89Place a_lane = sm89_a_lane(lane);
  const Sm89Place b_lane = sm89_b_lane(lane);
  const int a_offset = offsetof(Stage, a) + of_warp.row * kSm89RowBytes + sm89_a_offset(a_lane.row, a_lane.column);
  const int b_offset = offsetof(Stage, b) + of_warp.column * kSm89RowBytes + sm89_b_offset(b_lane.row, b_lane.column);
  const int scale_row = of_warp.row + sm89_out_lane(lane, 0).row;
  const int64_t b_scales_row = tile.column / static_cast<int>(kBlockSize) * args.b_scales_row_stride;
  const auto load_b_scale = [&](int k_block) {
    return load_scalar(args.b_scales, args.b_scales_dtype, b_scales_row + k_block * args.b_scales_column_stride);
  };

  Acc<Tiling> acc{};
  float next_b_scale = load_b_scale(0);
  int filled = 0;
  int to_fill = Tiling::kStages - 1;
#pragma unroll 1
  for (int k_block = 0; k_block < args.k_blocks; ++k_block) {
    wait_for_copies<Tiling::kStages - 2>();
    // Orders all threads' copies of this k block before any thread reads them, and all reads of the last one before any
    // thread copies over it.
    __syncthreads();
    loader.copy(stages + to_fill * static_cast<int>(sizeof(Stage)));
    const float b_scale = next_b_scale;
    next_b_scale = load_b_scale(min(k_block + 1, args.k_blocks - 1));

    const uint32_t stage = stages + filled * static_cast<int>(sizeof(Stage));
    Sums<Tiling> sums{};
    multiply_block<Tiling>(stage + a_offset, stage + b_offset, sums);
    promote<Tiling>(sums, reinterpret_cast<const Stage*>(shared_memory)[filled].a_scales + scale_row, b_scale, acc);
    filled = next(filled);
    to_fill = next(to_fill);
  }
  store_tile<Tiling>(args, {tile.row + of_warp.row, tile.column + of_warp.column}, lane, acc);
}

template <class Tiling>
Args make_args(const Fp8GemmParams& params) {
  const int64_t m = params.a.size(0);
  const int64_t n = params.b.size(0);
  const int64_t k = params.a.size(1);
  Args args{
      .a = static_cast<const uint8_t*>(params.a.data),
      .b = static_cast<const uint8_t*>(params.b.data),
      .a_stride = m == 1 ? 0 : params.a.stride(0),  // a single row's may be no multiple of 16
      .b_stride = params.b.stride(0),
      .a_scales = static_cast<const float*>(params.a_scales.data),
      .a_scales_stride = params.a_scales.stride(1),
      .b_scales = params.b_scales.data,
      .b_scales_dtype = params.b_scales.dtype,
      .b_scales_row_stride = params.b_scales.stride(0),
      .b_scales_column_stride = params.b_scales.stride(1),
      .out = params.out.data,
      .m = static_cast<int>(m),
      .n = static_cast<int>(n),
      .k = static_cast<int>(k),
      .k_blocks = static_cast<int>(num_blocks(k)),
      .tiles_m = static_cast<int>(ceil_div(m, Tiling::kTileM)),
      .tiles_n = static_cast<int>(ceil_div(n, Tiling::kTileN)),
  };
  args.band = std::min(Tiling::kConfig.band, args.tiles_m);
  if (params.bias) args.bias = static_cast<const float*>(params.bias->data);
  if (params.residual) {
    args.residual = params.residual->data;
    args.residual_stride = params.residual->stride(0);
    args.residual_in_fours = is_aligned(*params.residual, 4 * sizeof(typename Tiling::Out));
  }
  return args;
}

template <class Tiling>
void launch(const Fp8GemmParams& params, Stream stream) {
  static std::array<std::atomic<bool>, kMaxDevices> has_shared_memory;
  constexpr int kSharedBytes = sizeof(typename Tiling::Shared);
  const auto kernel = fp8_gemm_sm89_kernel<Tiling>;
  const int device = params.a.device.index;
  if (!has_shared_memory[device].load()) {
    LTX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "fp8_gemm");
    has_shared_memory[device].store(true);
  }
  const Args args = make_args<Tiling>(params);
  launch_overlapping("fp8_gemm", kernel, static_cast<unsigned>(args.tiles_m * args.tiles_n), Tiling::kThreads, device,
                     stream, args, kSharedBytes);
}

template <class Tiling>
bool launch_if_chosen(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream) {
  if (config != Tiling::kConfig) return false;
  launch<Tiling>(params, stream);
  return true;
}

template <class T, bool kHalfSums, size_t... i>
void launch_config(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream, std::index_sequence<i...>) {
  const bool launched = (launch_if_chosen<TilingOf<i, T, kHalfSums>>(params, config, stream) || ...);
  if (!launched) LTX_UNREACHABLE("fp8_gemm: no such configuration");
}

template <class T>
void launch_dtype(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream) {
  constexpr auto kCandidates = std::make_index_sequence<kFp8GemmSm89Candidates.size()>{};
  if (params.use_fast_accum) return launch_config<T, true>(params, config, stream, kCandidates);
  launch_config<T, false>(params, config, stream, kCandidates);
}

}  // namespace

void fp8_gemm_sm89(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream) {
  switch (params.out_dtype) {
    case DType::kBFloat16:
      return launch_dtype<__nv_bfloat16>(params, config, stream);
    case DType::kFloat16:
      return launch_dtype<__half>(params, config, stream);
    case DType::kFloat32:
      return launch_dtype<float>(params, config, stream);
    default:
      LTX_UNREACHABLE("fp8_gemm: out_dtype " + to_string(params.out_dtype));
  }
}

}  // namespace ltx
