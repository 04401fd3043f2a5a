#include "blockwise/fp8_gemm/fp8_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <type_traits>

#include "blockwise/fp8_gemm/fp8_gemm_cuda.h"
#include "blockwise/fp8_gemm/fp8_gemm_round.h"
#include "common/cuda/barrier.h"
#include "common/cuda/launch.h"
#include "common/cuda/mma_sm90.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/tma.h"

// A block computes tiles of out, one after the other. One warpgroup loads: a thread fetches the k blocks of a, b and
// a_scales by TMA into a ring of stages, a warp adds b_scales. Each other warpgroup multiplies 64 rows of the tile by
// wgmma out of the stages, and adds every k block's sums, scaled, to accumulators of its own. Blocks of a cluster
// either have tiles below each other and load b together, or share a tile and each sum a part of k.
//
// Shared memory: the stages, the buffers from which finished tiles are stored by TMA, and sums received from the
// cluster. Two barriers a stage: `full` (the two loaders arrive) and `empty` (the warps that read it).
namespace ltx {

namespace {

constexpr int kBlockK = static_cast<int>(kBlockSize);
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupWarps = kGroupThreads / kWarpSize;
constexpr int kGroupRows = 64;  // that it multiplies
constexpr int kWarpRows = kGroupRows / kGroupWarps;
constexpr uint32_t kFullMask = 0xFFFFFFFF;

// The configuration is an index: nvcc 13.0 compiles no kernel with a template argument of class type.
template <size_t kCandidate, class T, bool kHasResidual>
struct TilingOf {
  using Out = T;
  static constexpr bool kResidual = kHasResidual;
  static constexpr Fp8GemmConfig kConfig = kFp8GemmCandidates[kCandidate].config;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kClusterM = kConfig.cluster_m;
  static constexpr int kSplitK = kConfig.split_k;
  static constexpr int kCluster = kClusterM * kSplitK;
  static constexpr int kGroups = kTileM / kGroupRows;  // that multiply
  static constexpr int kWarps = kGroups * kGroupWarps;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;

  // A chunk is what one wgmma computes, 64 x kChunkN, under one scale of b.
  static constexpr int kChunkN = std::min(kTileN, kBlockK);
  static constexpr int kChunks = kTileN / kChunkN;
  // Two: the next chunk multiplies while one is promoted. One, where registers allow no more: others multiply then.
  static constexpr int kBuffers = kTileM * kTileN <= 128 * 128 ? 2 : 1;

  // A warp stores its 16 rows by kStoreColumns at a time.
  static constexpr int kOutColumns = kTileN / kSplitK;  // of a tile that this block finishes
  static constexpr int kStoreRowBytes = std::min(128, kOutColumns* static_cast<int>(sizeof(T)));
  static constexpr int kStoreColumns = kStoreRowBytes / static_cast<int>(sizeof(T));
  static_assert(kStoreRowBytes == 128 || kStoreRowBytes == 64);

  struct Stage {
    uint8_t a[kTileM * kBlockK];  // rows of 128 bytes, swizzled
    uint8_t b[kTileN * kBlockK];
  };
  struct Scales {
    float a[kTileM];
    float b[32];  // kChunks are used; TMA writes to multiples of 128 bytes
  };
  struct alignas(128) Shared {
    Stage stages[kStages];
    uint8_t store[kWarps][kSm90StoreBuffers][kSm90StoreBufferBytes];
    float4 received[std::max(8, (kSplitK - 1) * kTileM * kOutColumns / 4)];
    Scales scales[kStages];
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t sums_arrived;
  };
  static_assert(sizeof(Shared) == fp8_gemm_sm90_shared_bytes(kConfig) && sizeof(Shared) <= kSm90SharedBytes);
  static_assert(sizeof(Stage) % 1024 == 0 && sizeof(Shared::store) % 1024 == 0);  // of which a swizzle is a function

  static constexpr int kLoadedBytes = sizeof(Stage) + sizeof(Scales::a);
  // After the last tile a stage is free: two more store buffers a warp, if they fit and there is use for them.
  static constexpr bool kStoresThroughStage = kOutColumns / kStoreColumns > kSm90StoreBuffers &&
                                              sizeof(Shared::store) <= sizeof(Stage);
};

struct Args {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap a_scales;
  CUtensorMap out;
  const void* b_scales;  // [b_scale_rows, k_blocks]
  DType b_scales_dtype;
  int64_t b_scales_row_stride;
  int64_t b_scales_column_stride;
  const float* bias;     // [n], or nullptr
  const void* residual;  // [m, n] of out's dtype, or nullptr
  int64_t residual_stride;
  bool residual_in_pairs;  // two neighbours may be read in one access
  int m;
  int n;
  int k_blocks;
  int b_scale_rows;
  int tiles_m;  // of clusters
  int tiles_n;
  int band;
};

struct Place {
  int row;  // of the block's tile, in out
  int column;
};

// This block's part of the work: tiles `first_tile`, + `tile_step`, ... and of each the k blocks [k_begin, k_end).
template <class Tiling>
struct Share {
  int rank_m;  // in the cluster
  int rank_k;
  int first_tile;
  int tile_step;
  int num_tiles;
  int k_begin;
  int k_end;

  __device__ explicit Share(const Args& args) {
    const int rank = Tiling::kCluster > 1 ? cluster_rank() : 0;
    rank_m = rank % Tiling::kClusterM;
    rank_k = rank / Tiling::kClusterM;
    first_tile = static_cast<int>(blockIdx.x) / Tiling::kCluster;
    tile_step = static_cast<int>(gridDim.x) / Tiling::kCluster;
    num_tiles = args.tiles_m * args.tiles_n;
    k_begin = rank_k * args.k_blocks / Tiling::kSplitK;
    k_end = (rank_k + 1) * args.k_blocks / Tiling::kSplitK;
  }

  // Tiles go down a band, then to the band's next column.
  __device__ Place place(const Args& args, int tile) const {
    const int band = tile / (args.band * args.tiles_n);
    const int in_band = tile - band * args.band * args.tiles_n;
    const int first = band * args.band;
    const int height = min(args.band, args.tiles_m - first);
    const int tile_n = in_band / height;
    const int tile_m = first + in_band - tile_n * height;
    return {(tile_m * Tiling::kClusterM + rank_m) * Tiling::kTileM, tile_n * Tiling::kTileN};
  }
};

// The addresses of shared memory.
template <class Tiling>
struct Addresses {
  using Shared = typename Tiling::Shared;
  uint32_t base;

  __device__ uint32_t stage(int stage) const {
    return base + offsetof(Shared, stages) + stage * static_cast<int>(sizeof(typename Tiling::Stage));
  }
  __device__ uint32_t scales(int stage) const {
    return base + offsetof(Shared, scales) + stage * static_cast<int>(sizeof(typename Tiling::Scales));
  }
  __device__ uint32_t full(int stage) const { return base + offsetof(Shared, full) + stage * 8; }
  __device__ uint32_t empty(int stage) const { return base + offsetof(Shared, empty) + stage * 8; }
  __device__ uint32_t sums_arrived() const { return base + offsetof(Shared, sums_arrived); }
};

// Registers of a thread once the roles part; of all threads together at most the 65,536 of an SM. A block with one
// multiplying warpgroup has enough for both roles.
constexpr int loader_registers(int groups) { return groups == 2 ? 40 : 32; }
constexpr int multiplier_registers(int groups) { return groups == 2 ? 232 : 160; }

// One thread: a, b and a_scales of every k block into the stages.
template <class Tiling>
__device__ __forceinline__ void load_tiles(const Args& args, const Addresses<Tiling>& shared,
                                           const Share<Tiling>& share) {
  constexpr int kRowsOfB = Tiling::kTileN / Tiling::kClusterM;  // that this block loads for its cluster
  uint16_t column_of_cluster = 0;                               // the blocks that have the same part of b
  for (int i = 0; i < Tiling::kClusterM; ++i) column_of_cluster |= 1 << (i + Tiling::kClusterM * share.rank_k);
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = share.first_tile; tile < share.num_tiles; tile += share.tile_step) {
    const Place place = share.place(args, tile);
#pragma unroll 1
    for (int k_block = share.k_begin; k_block < share.k_end; ++k_block) {
      const uint32_t a = shared.stage(stage);
      const uint32_t b = a + sizeof(Tiling::Stage::a);
      const uint32_t full = shared.full(stage);
      wait(shared.empty(stage), parity);
      arrive_expecting(full, Tiling::kLoadedBytes);
      if constexpr (Tiling::kClusterM > 1) {
        load_box_to_cluster(b + share.rank_m * kRowsOfB * kBlockK, args.b, full, place.column + share.rank_m * kRowsOfB,
                            k_block * kBlockK, column_of_cluster);
      } else {
        load_box(b, args.b, full, place.column, k_block * kBlockK);
      }
      load_box(a, args.a, full, place.row, k_block * kBlockK);
      load_box(shared.scales(stage), args.a_scales, full, k_block, place.row);
      if (++stage == Tiling::kStages) stage = 0, parity ^= 1;
    }
  }
}

__device__ inline float load_b_scale(const Args& args, int row, int column) {
  const int64_t offset = row * args.b_scales_row_stride + column * args.b_scales_column_stride;
  if (args.b_scales_dtype == DType::kFloat32) return __ldg(static_cast<const float*>(args.b_scales) + offset);
  if (args.b_scales_dtype == DType::kFloat16) return __ldg(static_cast<const __half*>(args.b_scales) + offset);
  return __ldg(static_cast<const __nv_bfloat16*>(args.b_scales) + offset);
}

// One warp: b_scales of every k block into the stages. Each lane holds those of one of 32 k blocks, so that their
// latency is paid once in 32.
template <class Tiling>
__device__ __forceinline__ void load_b_scales(const Args& args, const Addresses<Tiling>& shared,
                                              const Share<Tiling>& share, int lane) {
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = share.first_tile; tile < share.num_tiles; tile += share.tile_step) {
    const int first_row = share.place(args, tile).column / kBlockK;
    for (int k_first = share.k_begin; k_first < share.k_end; k_first += kWarpSize) {
      float values[Tiling::kChunks];
#pragma unroll
      for (int i = 0; i < Tiling::kChunks; ++i) {
        values[i] = load_b_scale(args, min(first_row + i, args.b_scale_rows - 1), min(k_first + lane, share.k_end - 1));
      }
      for (int i = 0; i < min(kWarpSize, share.k_end - k_first); ++i) {
        wait(shared.empty(stage), parity);
        if (lane == i) {
#pragma unroll
          for (int chunk = 0; chunk < Tiling::kChunks; ++chunk) {
            store_shared(shared.scales(stage) + sizeof(Tiling::Scales::a) + chunk * 4, values[chunk]);
          }
          arrive(shared.full(stage));
        }
        __syncwarp();
        if (++stage == Tiling::kStages) stage = 0, parity ^= 1;
      }
    }
  }
}

// Two neighbours of a row.
__device__ inline float2 load_pair(const float* from) { return __ldg(reinterpret_cast<const float2*>(from)); }
__device__ inline float2 load_pair(const __nv_bfloat16* from) {
  return __bfloat1622float2(__ldg(reinterpret_cast<const __nv_bfloat162*>(from)));
}
__device__ inline float2 load_pair(const __half* from) {
  return __half22float2(__ldg(reinterpret_cast<const __half2*>(from)));
}
template <class T>
__device__ inline float2 load_pair(const T* from, bool in_one_access) {
  if (in_one_access) return load_pair(from);
  return {static_cast<float>(__ldg(from)), static_cast<float>(__ldg(from + 1))};
}

// What a thread of a multiplying warpgroup holds and does. All is inlined: arrays must stay in registers.
template <class Tiling>
class Multiplier {
 public:
  __device__ Multiplier(const Args& args, const Addresses<Tiling>& shared, const Share<Tiling>& share, int warp,
                        int lane)
      : args_(args),
        shared_(shared),
        share_(share),
        warp_(warp),
        lane_(lane),
        row_(warp * kWarpRows),
        a_(mma_descriptor(shared.stage(0) + warp / kGroupWarps * kGroupRows * kBlockK)),
        b_(mma_descriptor(shared.stage(0) + sizeof(Tiling::Stage::a))) {}

  // A finished tile is stored while the first k block of the next one multiplies; with a residual before that, since
  // code with so many branches between wgmmas makes ptxas wait for each (C7514).
  __device__ __forceinline__ void run() {
    constexpr bool kStoresLater = Tiling::kSplitK == 1 && !Tiling::kResidual;
    bool pending = false;
    Place finished{0, 0};
    for (int tile = share_.first_tile; tile < share_.num_tiles; tile += share_.tile_step) {
      const Place place = share_.place(args_, tile);
      multiply_tile([&](int chunk) {
        if (kStoresLater && pending) store_chunk(chunk, finished, false);
      });
      pending = true;
      finished = place;
      if constexpr (Tiling::kSplitK == 1 && Tiling::kResidual) {
#pragma unroll
        for (int chunk = 0; chunk < Tiling::kChunks; ++chunk) store_chunk(chunk, place, false);
      }
    }
    if constexpr (Tiling::kSplitK > 1) {
      add_sums_of_cluster_and_store(finished);
    } else if constexpr (kStoresLater) {
      if (Tiling::kStoresThroughStage) {
        wait(shared_.empty(stage_), parity_ ^ 1);  // after the last read of the stage by any warp
        stored_ = 0;
      }
      if (pending) {
#pragma unroll
        for (int chunk = 0; chunk < Tiling::kChunks; ++chunk) store_chunk(chunk, finished, true);
      }
    }
    if (lane_ == 0) wait_until_stored<0>();  // shared memory must outlive TMA's reads
    __syncwarp();
  }

 private:
  static constexpr int kChunkSize = Tiling::kChunkN / 2;  // values a thread

  using Sums = float[Tiling::kBuffers][kChunkSize];  // over a k block, of wgmma

  // a_scales * b_scales of the stage for this thread's two rows
  struct Scales {
    float values[Tiling::kChunks][2];
  };

  __device__ __forceinline__ void advance() {
    constexpr int kStep = sizeof(typename Tiling::Stage) / kMmaDescriptorUnit;
    ++stage_;
    a_ += kStep;
    b_ += kStep;
    if (stage_ == Tiling::kStages) {
      stage_ = 0;
      a_ -= Tiling::kStages * kStep;
      b_ -= Tiling::kStages * kStep;
      parity_ ^= 1;
    }
  }

  // Waits for the data of the stage and takes its scales.
  __device__ __forceinline__ void enter(Scales& scales) {
    wait(shared_.full(stage_), parity_);
    const uint32_t stage_scales = shared_.scales(stage_);
    float b[Tiling::kChunks];
#pragma unroll
    for (int chunk = 0; chunk < Tiling::kChunks; ++chunk) {
      b[chunk] = load_shared(stage_scales + sizeof(Tiling::Scales::a) + chunk * 4);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float a = load_shared(stage_scales + (row_ + half * 8 + lane_ / 4) * 4);
#pragma unroll
      for (int chunk = 0; chunk < Tiling::kChunks; ++chunk) scales.values[chunk][half] = a * b[chunk];
    }
  }

  // Starts a chunk of the stage.
  __device__ __forceinline__ void start(int chunk, float (&sums)[kChunkSize]) {
    constexpr int kChunkStep = Tiling::kChunkN * kBlockK / kMmaDescriptorUnit;
    start_mma();
#pragma unroll
    for (int i = 0; i < kBlockK / kMmaDepth; ++i) {
      constexpr int kStep = kMmaDepth / kMmaDescriptorUnit;
      mma(sums, a_ + i * kStep, b_ + chunk * kChunkStep + i * kStep, i > 0);
    }
    end_mma();
  }

  // acc += sums * scales, a fused multiply-add; the first time without acc. Written with __fmaf_rn, or as an addition
  // to 0 the first time, it makes ptxas 13.0 wait for each wgmma (C7514).
  __device__ __forceinline__ void promote(int chunk, const float (&sums)[kChunkSize], bool first) {
#pragma unroll
    for (int i = 0; i < kChunkSize; ++i) {
      const float scale = scales_.values[chunk][i / 2 % 2];
      float& acc = acc_[chunk][i];
      acc = first ? sums[i] * scale : acc + sums[i] * scale;
    }
  }

  // This warp is done with a stage: tells the blocks whose TMA writes to it, each by one lane.
  __device__ __forceinline__ void release(int stage) {
    __syncwarp();  // orders all lanes' reads of the scales before the arrivals, and so before the loaders' next writes
    const bool arrives = lane_ < Tiling::kClusterM;
    if constexpr (Tiling::kClusterM > 1) {
      arrive_in_cluster_if(arrives, shared_.empty(stage), lane_ + Tiling::kClusterM * share_.rank_k);
    } else {
      arrive_if(arrives, shared_.empty(stage));
    }
  }

  // One k block. Its stage has been entered and, with two buffers, its first chunk started, in buffer kBuffer. While
  // its last chunk multiplies the next stage is entered, and with two buffers the first chunk there started.
  // during(chunk) is called in the first k block of a tile before acc_[chunk] is written.
  template <int kBuffer, bool kFirst, bool kLast, class During>
  __device__ __forceinline__ void multiply_block(Sums& sums, const During& during) {
    constexpr bool kTwo = Tiling::kBuffers == 2;
    const int stage = stage_;
    Scales next_scales;
#pragma unroll
    for (int chunk = 0; chunk < Tiling::kChunks; ++chunk) {
      constexpr auto buffer_of = [](int chunk) { return kTwo ? (kBuffer + chunk) % 2 : 0; };
      if constexpr (!kTwo) start(chunk, sums[0]);
      if (chunk + 1 < Tiling::kChunks) {
        if constexpr (kTwo) start(chunk + 1, sums[buffer_of(chunk + 1)]);
      } else {
        advance();
        if constexpr (!kLast) {
          enter(next_scales);
          if constexpr (kTwo) start(0, sums[buffer_of(chunk + 1)]);
        }
      }
      if constexpr (kFirst) during(chunk);
      if (kTwo && !(kLast && chunk + 1 == Tiling::kChunks)) {
        wait_for_mma<1>(sums[buffer_of(chunk)]);
      } else {
        wait_for_mma<0>(sums[buffer_of(chunk)]);
      }
      if (chunk + 1 == Tiling::kChunks) release(stage);
      promote(chunk, sums[buffer_of(chunk)], kFirst);
    }
    if constexpr (!kLast) scales_ = next_scales;
  }

  template <class During>
  __device__ __forceinline__ void multiply_tile(const During& during) {
    const auto nothing = [](int) {};
    Sums sums;
    int left = share_.k_end - share_.k_begin;
    enter(scales_);
    if constexpr (Tiling::kBuffers == 2) start(0, sums[0]);
    if (left == 1) {
      multiply_block<0, true, true>(sums, during);
      return;
    }
    multiply_block<0, true, false>(sums, during);
    --left;
    if constexpr (Tiling::kBuffers == 2) {
      // Two k blocks a turn: in a loop of one, wgmmas in flight over its end make ptxas wait for each (C7514).
      constexpr int kSecond = Tiling::kChunks % 2;  // the buffer with which the second k block starts
      for (; left > 2; left -= 2) {
        multiply_block<kSecond, false, false>(sums, nothing);
        multiply_block<0, false, false>(sums, nothing);
      }
      if (left == 2) {
        multiply_block<kSecond, false, false>(sums, nothing);
        multiply_block<0, false, true>(sums, nothing);
      } else {
        multiply_block<kSecond, false, true>(sums, nothing);
      }
    } else {
      for (; left > 1; --left) multiply_block<0, false, false>(sums, nothing);
      multiply_block<0, false, true>(sums, nothing);
    }
  }

  // 16 columns of this warp's rows: values[4 h + 2 r + {0, 1}] are of row lane / 4 + 8 r and of the columns
  // 8 h + lane % 4 * 2 + {0, 1}.
  __device__ __forceinline__ void add_bias(float* values, int column) {
    if (args_.bias == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = column + 8 * h + lane_ % 4 * 2;
      if (at >= args_.n) continue;
      const float2 bias = load_pair(args_.bias + at);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        values[4 * h + 2 * r] += bias.x;
        values[4 * h + 2 * r + 1] += bias.y;
      }
    }
  }

  __device__ __forceinline__ void add_residual(float* values, int row, int column) {
    using T = typename Tiling::Out;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at_row = row + lane_ / 4 + 8 * r;
      const T* from = static_cast<const T*>(args_.residual) + at_row * args_.residual_stride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = column + 8 * h + lane_ % 4 * 2;
        if (at_row >= args_.m || at >= args_.n) continue;
        const float2 residual = load_pair(from + at, args_.residual_in_pairs);
        values[4 * h + 2 * r] += residual.x;
        values[4 * h + 2 * r + 1] += residual.y;
      }
    }
  }

  // 16 columns of this warp's rows, from column `first` of a store buffer on, swizzled as TMA expects it.
  __device__ __forceinline__ void fill(uint32_t buffer, int first, const float* values) {
    using T = typename Tiling::Out;
    // A swizzle XORs the index of a 16-byte chunk with the index of its 128 bytes, modulo the chunks of a row.
    const auto address = [&](int row, int byte) {
      constexpr int kChunksOfRow = Tiling::kStoreRowBytes / 16;
      const int swizzle = row * Tiling::kStoreRowBytes / 128 % kChunksOfRow;
      return buffer + row * Tiling::kStoreRowBytes + ((byte / 16) ^ swizzle) * 16 + byte % 16;
    };
    if constexpr (sizeof(T) == 2) {
      store_matrices(address(lane_ % 16, first * 2 + lane_ / 16 * 16), round_pair<T>(values[0], values[1]),
                     round_pair<T>(values[2], values[3]), round_pair<T>(values[4], values[5]),
                     round_pair<T>(values[6], values[7]));
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          store_shared2(address(lane_ / 4 + 8 * r, (first + 8 * h + lane_ % 4 * 2) * 4),
                        with_quiet_nan(values[4 * h + 2 * r]), with_quiet_nan(values[4 * h + 2 * r + 1]));
        }
      }
    }
  }

  // kColumns columns of this warp's rows. `last`: no k blocks follow.
  template <int kColumns>
  __device__ __forceinline__ void store(float (&values)[kColumns / 2], int row, int column, bool last) {
    const bool through_stage = Tiling::kStoresThroughStage && last;
#pragma unroll
    for (int part = 0; part < kColumns / Tiling::kStoreColumns; ++part) {
      const uint32_t buffers =
          stored_ < kSm90StoreBuffers ? shared_.base + offsetof(typename Tiling::Shared, store) : shared_.stage(stage_);
      const uint32_t buffer =
          buffers + (warp_ * kSm90StoreBuffers + stored_ % kSm90StoreBuffers) * kSm90StoreBufferBytes;
      if (!through_stage || stored_ == 0) {
        if (lane_ == 0) {
          if (through_stage) {
            wait_until_stored<0>();
          } else {
            wait_until_stored<kSm90StoreBuffers - 1>();
          }
        }
        __syncwarp();  // orders TMA's reads of the buffer, which lane 0 has waited for, before all lanes' writes
      }
#pragma unroll
      for (int i = 0; i < Tiling::kStoreColumns / 16; ++i) {
        float* sixteen = values + part * Tiling::kStoreColumns / 2 + i * 8;
        const int first = column + part * Tiling::kStoreColumns + i * 16;
        add_bias(sixteen, first);
        if constexpr (Tiling::kResidual) add_residual(sixteen, row, first);
        fill(buffer, i * 16, sixteen);
      }
      fence_before_tma_store();
      __syncwarp();  // orders all lanes' writes and fences before lane 0's store
      if (lane_ == 0) store_box(args_.out, buffer, row, column + part * Tiling::kStoreColumns);
      stored_ = (stored_ + 1) % (through_stage ? 2 * kSm90StoreBuffers : kSm90StoreBuffers);
    }
  }

  __device__ __forceinline__ void store_chunk(int chunk, const Place& place, bool last) {
    store<Tiling::kChunkN>(acc_[chunk], place.row + row_, place.column + chunk * Tiling::kChunkN, last);
  }

  // Block r of the cluster finishes the r-th part of the tile's columns: the others send it their sums of them.
  __device__ __forceinline__ void add_sums_of_cluster_and_store(const Place& place) {
    static_assert(Tiling::kChunks == 1 && Tiling::kSplitK <= 2);  // two sums have the same total in either order
    constexpr int kSize = Tiling::kOutColumns / 2;                // values a thread
    constexpr int kStep = Tiling::kGroups * kGroupThreads * static_cast<int>(sizeof(float4));
    const uint32_t received = shared_.base + offsetof(typename Tiling::Shared, received) + threadIdx.x * sizeof(float4);
    float own[kSize];
#pragma unroll
    for (int part = 0; part < Tiling::kSplitK; ++part) {
      const float* sums = acc_[0] + part * kSize;
      if (part == share_.rank_k) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) own[i] = sums[i];
      } else {
        const int slot = share_.rank_k < part ? share_.rank_k : share_.rank_k - 1;
        const uint32_t to = address_in_cluster(received, part) + slot * (kSize / 4) * kStep;
        const uint32_t barrier = address_in_cluster(shared_.sums_arrived(), part);
#pragma unroll
        for (int i = 0; i < kSize / 4; ++i) {
          store_async(to + i * kStep, barrier, sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        }
      }
    }
    wait_for_cluster(shared_.sums_arrived(), 0);  // after the other blocks' store_async into `received`
#pragma unroll
    for (int i = 0; i < (Tiling::kSplitK - 1) * (kSize / 4); ++i) {
      const float4 sums = load_shared4(received + i * kStep);
      float* to = own + i % (kSize / 4) * 4;
      to[0] += sums.x;
      to[1] += sums.y;
      to[2] += sums.z;
      to[3] += sums.w;
    }
    store<Tiling::kOutColumns>(own, place.row + row_, place.column + share_.rank_k * Tiling::kOutColumns, true);
  }

  const Args& args_;
  const Addresses<Tiling>& shared_;
  const Share<Tiling>& share_;
  const int warp_;
  const int lane_;
  const int row_;  // of the tile, of this warp's first
  int stage_ = 0;
  uint32_t parity_ = 0;
  uint64_t a_;  // descriptors of the stage's operands
  uint64_t b_;
  Scales scales_;
  float acc_[Tiling::kChunks][kChunkSize];
  int stored_ = 0;  // which store buffer is next
};

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1) fp8_gemm_sm90_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const Addresses<Tiling> shared{shared_address(shared_memory)};
  const Share<Tiling> share(args);
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tiling::kStages; ++stage) {
      init_barrier(shared.full(stage), 2);
      init_barrier(shared.empty(stage), Tiling::kWarps * Tiling::kClusterM);
    }
    if constexpr (Tiling::kSplitK > 1) {
      init_barrier(shared.sums_arrived(), 1);
      arrive_expecting(shared.sums_arrived(), sizeof(Tiling::Shared::received));
    }
    fence_barrier_init();  // orders these before the arrivals of TMA and of other blocks
  }
  if (threadIdx.x == Tiling::kGroups * kGroupThreads) {
    for (const CUtensorMap* map : {&args.a, &args.b, &args.a_scales, &args.out}) prefetch(*map);
  }
  if constexpr (Tiling::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  let_next_kernel_start();

  if (warp >= Tiling::kWarps) {
    if constexpr (Tiling::kGroups > 1) lower_registers<loader_registers(Tiling::kGroups)>();
    wait_for_previous_kernel();
    if (warp == Tiling::kWarps && elect_one()) {
      load_tiles(args, shared, share);
    } else if (warp == Tiling::kWarps + 1) {
      load_b_scales(args, shared, share, lane);
    }
    __syncwarp();
  } else {
    if constexpr (Tiling::kGroups > 1) raise_registers<multiplier_registers(Tiling::kGroups)>();
    wait_for_previous_kernel();
    Multiplier<Tiling>(args, shared, share, warp, lane).run();
  }
  if constexpr (Tiling::kClusterM > 1) cluster_sync();  // no block ends while another may still arrive at its barriers
}

template <class T>
constexpr CUtensorMapDataType kTmaDType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
constexpr CUtensorMapDataType kTmaDType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
constexpr CUtensorMapDataType kTmaDType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

template <class Tiling>
Args make_args(const Fp8GemmParams& params) {
  const int64_t m = params.a.size(0);
  const int64_t n = params.b.size(0);
  const int64_t k = params.a.size(1);
  const int64_t k_blocks = num_blocks(k);
  const auto map = [](CUtensorMapDataType dtype, const TensorView& view, int64_t rows, int64_t columns, int64_t pitch,
                      int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
    return make_tensor_map("fp8_gemm", {dtype, view.data, rows, columns, pitch * size_of(view.dtype)}, box_rows,
                           box_columns, swizzle);
  };
  const auto matrix = [&](const TensorView& view, int box_rows) {  // the stride of a single row may be anything
    return map(CU_TENSOR_MAP_DATA_TYPE_UINT8, view, view.size(0), k, view.size(0) == 1 ? k : view.stride(0), box_rows,
               kBlockK, CU_TENSOR_MAP_SWIZZLE_128B);
  };
  Args args{
      .a = matrix(params.a, Tiling::kTileM),
      .b = matrix(params.b, Tiling::kTileN / Tiling::kClusterM),
      .a_scales = map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, params.a_scales, k_blocks, m,
                      k_blocks == 1 ? padded_rows(m) : params.a_scales.stride(1), 1, Tiling::kTileM,
                      CU_TENSOR_MAP_SWIZZLE_NONE),
      .out = map(kTmaDType<typename Tiling::Out>, params.out, m, n, n, kWarpRows, Tiling::kStoreColumns,
                 Tiling::kStoreRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B),
      .b_scales = params.b_scales.data,
      .b_scales_dtype = params.b_scales.dtype,
      .b_scales_row_stride = params.b_scales.stride(0),
      .b_scales_column_stride = params.b_scales.stride(1),
      .m = static_cast<int>(m),
      .n = static_cast<int>(n),
      .k_blocks = static_cast<int>(k_blocks),
      .b_scale_rows = static_cast<int>(num_blocks(n)),
      .tiles_m = static_cast<int>(ceil_div(m, Tiling::kTileM * Tiling::kClusterM)),
      .tiles_n = static_cast<int>(ceil_div(n, Tiling::kTileN)),
  };
  args.band = std::min(Tiling::kConfig.band, args.tiles_m);
  if (params.bias) args.bias = static_cast<const float*>(params.bias->data);
  if (params.residual) {
    args.residual = params.residual->data;
    args.residual_stride = params.residual->stride(0);
    args.residual_in_pairs = (m == 1 || args.residual_stride % 2 == 0) &&
                             reinterpret_cast<uintptr_t>(args.residual) % (2 * sizeof(typename Tiling::Out)) == 0;
  }
  return args;
}

// How many clusters a device runs at a time. The first call for it also lets the kernel have its shared memory.
template <class Tiling>
int max_clusters(int device) {
  static std::array<std::atomic<int>, kMaxDevices> known;
  if (const int clusters = known[device].load()) return clusters;
  const auto kernel = fp8_gemm_sm90_kernel<Tiling>;
  constexpr int kSharedBytes = sizeof(typename Tiling::Shared);
  LTX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "fp8_gemm");
  int clusters = 0;
  if constexpr (Tiling::kCluster == 1) {  // without a cluster's attribute the query for clusters answers 0
    LTX_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, Tiling::kThreads, kSharedBytes),
                   "fp8_gemm");
    clusters *= cuda_num_sms(device);
  } else {
    const unsigned num_blocks = cuda_num_sms(device) / Tiling::kCluster * Tiling::kCluster;
    LaunchConfig launch({num_blocks}, Tiling::kThreads, kSharedBytes, Tiling::kCluster);
    LTX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config), "fp8_gemm");
  }
  LTX_CHECK(clusters > 0, "fp8_gemm: device " + std::to_string(device) + " must have room for a cluster of " +
                              std::to_string(Tiling::kCluster) + " blocks, got none");
  known[device].store(clusters);
  return clusters;
}

template <class Tiling>
void launch(const Fp8GemmParams& params, Stream stream) {
  const int device = params.a.device.index;
  const Args args = make_args<Tiling>(params);
  const int tiles = args.tiles_m * args.tiles_n;
  const int resident = max_clusters<Tiling>(device);
  const int clusters = Tiling::kSplitK > 1 ? tiles : std::min(tiles, resident);  // a split tile is its blocks' only one
  launch_overlapping("fp8_gemm", fp8_gemm_sm90_kernel<Tiling>, static_cast<unsigned>(clusters * Tiling::kCluster),
                     Tiling::kThreads, device, stream, args, sizeof(typename Tiling::Shared), Tiling::kCluster);
}

template <class T, bool kHasResidual, size_t... i>
void launch_config(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream, std::index_sequence<i...>) {
  const bool launched =
      ((config == kFp8GemmCandidates[i].config && (launch<TilingOf<i, T, kHasResidual>>(params, stream), true)) || ...);
  if (!launched) LTX_UNREACHABLE("fp8_gemm: no such configuration");
}

template <class T>
void launch_for(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream) {
  constexpr auto kCandidates = std::make_index_sequence<kFp8GemmCandidates.size()>{};
  if (params.residual) {
    launch_config<T, true>(params, config, stream, kCandidates);
  } else {
    launch_config<T, false>(params, config, stream, kCandidates);
  }
}

}  // namespace

void fp8_gemm_sm90(const Fp8GemmParams& params, const Fp8GemmConfig& config, Stream stream) {
  switch (params.out_dtype) {
    case DType::kBFloat16:
      return launch_for<__nv_bfloat16>(params, config, stream);
    case DType::kFloat16:
      return launch_for<__half>(params, config, stream);
    case DType::kFloat32:
      return launch_for<float>(params, config, stream);
    default:
      LTX_UNREACHABLE("fp8_gemm: out_dtype " + to_string(params.out_dtype));
  }
}

}  // namespace ltx
