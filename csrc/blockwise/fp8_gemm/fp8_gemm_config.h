#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "blockwise/quantize_block.h"

// Which kernel computes a product on a GPU, and how it cuts it into tiles. All of it follows from the sizes, the number
// of SMs and the compute capability, so a test needs no GPU.
namespace ltx {

struct Fp8GemmConfig {
  int arch = 0;       // of the kernel: 90 is fp8_gemm_sm90.cu, 89 fp8_gemm_sm89.cu
  int tile_m = 0;     // rows of out that a block computes at a time
  int tile_n = 0;     // and columns
  int stages = 0;     // k blocks of a tile that shared memory holds
  int cluster_m = 0;  // blocks with tiles below each other that share what they load of b
  int split_k = 0;    // blocks that share a tile, each summing a part of k
  int band = 0;       // clusters' tiles in m that are computed side by side, so that the L2 serves b to all of them

  bool operator==(const Fp8GemmConfig&) const = default;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Fp8GemmTile {
  int m;  // counted in tiles
  int n;
};

// The place of tile `index` of all: they go down a band, then to the band's next column.
constexpr Fp8GemmTile fp8_gemm_tile(int index, int tiles_m, int tiles_n, int band) {
  const int band_index = index / (band * tiles_n);
  const int in_band = index - band_index * band * tiles_n;
  const int first = band_index * band;
  const int height = std::min(band, tiles_m - first);
  const int n = in_band / height;
  return {first + in_band - n * height, n};
}

// Shared memory of the SM90 kernel, whose struct Shared has these parts.
inline constexpr int kSm90SharedBytes = 227 * 1024;  // what a block may have
inline constexpr int kSm90MaxStages = 12;
inline constexpr int kSm90StoreBuffers = 2;             // of each warp that multiplies
inline constexpr int kSm90StoreBufferBytes = 16 * 128;  // rows x bytes of a TMA store

constexpr int fp8_gemm_sm90_shared_bytes(const Fp8GemmConfig& config) {
  constexpr int kAlignment = 128;  // of what TMA writes
  const int stage = (config.tile_m + config.tile_n) * static_cast<int>(kBlockSize);
  const int scales = config.tile_m * 4 + kAlignment;
  const int warps = config.tile_m / 16;
  const int received = (config.split_k - 1) * config.tile_m * config.tile_n / config.split_k * 4;
  const int barriers = static_cast<int>(ceil_div((2 * config.stages + 1) * 8, kAlignment)) * kAlignment;
  return config.stages * (stage + scales) + warps * kSm90StoreBuffers * kSm90StoreBufferBytes +
         std::max(received, kAlignment) + barriers;
}

// What can be chosen, with the cost of one k block of a tile and what a tile costs beside, in clock cycles of an SM.
struct Fp8GemmCandidate {
  Fp8GemmConfig config;
  int block_cost;
  int tile_cost;
};

constexpr Fp8GemmCandidate sm90_candidate(int tile_m, int tile_n, int cluster_m, int split_k, int band, int block_cost,
                                          int tile_cost = 0) {
  Fp8GemmConfig config{90, tile_m, tile_n, kSm90MaxStages, cluster_m, split_k, band};
  while (fp8_gemm_sm90_shared_bytes(config) > kSm90SharedBytes) --config.stages;
  return {config, block_cost, tile_cost};
}

// The costs are those of an H200 running the main loop alone, plus some percent for small tiles, which draw more power
// per product, measured with the kernel's prototype. At equal cost the first is taken. Rejected after measurement on an
// H200: 256 x 128 with four warpgroups (4 to 15% slower), clusters that share a (slower at every size), clusters of 192
// x 128 and 128 x 128 (554 cycles against 528).
inline constexpr std::array kFp8GemmCandidates = {
    sm90_candidate(128, 128, 1, 1, 8, 590),     // two accumulators hide the promotion: 528 cycles, ideal 512
    sm90_candidate(192, 128, 1, 1, 4, 850),     // three warpgroups hide each other's: 803 cycles, ideal 768
    sm90_candidate(128, 256, 2, 1, 4, 1140),    // 1123 cycles, ideal 1024; the least traffic, for long k
    sm90_candidate(64, 128, 2, 1, 8, 330),      // short m: more blocks than 128 x 128 gives
    sm90_candidate(64, 64, 2, 1, 8, 215),       // and more again
    sm90_candidate(64, 64, 1, 2, 8, 215, 900),  // too few tiles for the GPU: two blocks a tile, which add their sums
    sm90_candidate(64, 128, 1, 1, 8, 330),      // m <= 64: the second block of a cluster would have no rows
    sm90_candidate(64, 64, 1, 1, 8, 215),
};

// Shared memory of the SM89 kernel, whose struct Shared has these parts. 8.9 and 12.0 have 100 KB an SM, 1 KB of it
// reserved for each block.
inline constexpr int kSm89SharedBytes = 99 * 1024;

constexpr int fp8_gemm_sm89_shared_bytes(const Fp8GemmConfig& config) {
  return config.stages * ((config.tile_m + config.tile_n) * static_cast<int>(kBlockSize) + config.tile_m * 4);
}

// Reasoned, not measured: no GPU of these has run it. The costs are those of the model in docs/measured_facts.md for an
// L40S: the tensor cores' cycles, and 2 us for a tile's first loads and last stores, half of them hidden by the other
// block where two have room in an SM.
inline constexpr std::array kFp8GemmSm89Candidates = {
    Fp8GemmCandidate{{89, 128, 128, 3, 1, 1, 8}, 2048, 5000},
    Fp8GemmCandidate{{89, 128, 64, 4, 1, 1, 8}, 1024, 5000},  // short grids
    Fp8GemmCandidate{{89, 64, 64, 3, 1, 1, 8}, 512, 2500},    // shorter ones; two blocks have room in an SM
};

constexpr bool fp8_gemm_config_fits(const Fp8GemmConfig& config, int64_t k) {
  return num_blocks(k) >= config.split_k;  // each part of k has a block
}

// Of the kernel that a call without a config runs: the other one is only forced, by tests and the benchmark.
inline constexpr int kFp8GemmPublicArch = 90;

// The architecture of the kernel for a device, 0 if there is none.
constexpr int fp8_gemm_arch(int capability) {
  if (capability == 90) return 90;
  return capability >= 89 ? 89 : 0;
}

constexpr std::span<const Fp8GemmCandidate> fp8_gemm_candidates(int arch) {
  if (arch == 90) return kFp8GemmCandidates;
  if (arch == 89) return kFp8GemmSm89Candidates;
  return {};
}

// The candidate with the fewest waves x cost of a tile; none where there is no kernel for the capability.
constexpr std::optional<Fp8GemmConfig> fp8_gemm_config(int64_t m, int64_t n, int64_t k, int num_sms, int capability) {
  std::optional<Fp8GemmConfig> best;
  double best_cost = 0;  // exact up to 2^53; the largest sizes exceed 64 bits
  for (const Fp8GemmCandidate& candidate : fp8_gemm_candidates(fp8_gemm_arch(capability))) {
    const Fp8GemmConfig& config = candidate.config;
    const int64_t clusters = num_sms / (config.cluster_m * config.split_k);  // that run at a time
    if (clusters == 0 || !fp8_gemm_config_fits(config, k)) continue;
    const int64_t tiles = ceil_div(m, config.tile_m * config.cluster_m) * ceil_div(n, config.tile_n);
    const int64_t tile_cost = ceil_div(num_blocks(k), config.split_k) * candidate.block_cost + candidate.tile_cost;
    const double cost = static_cast<double>(ceil_div(tiles, clusters)) * static_cast<double>(tile_cost);
    if (!best || cost < best_cost) {
      best = config;
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace ltx
