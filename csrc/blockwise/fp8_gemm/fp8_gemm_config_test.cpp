#include "blockwise/fp8_gemm/fp8_gemm_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>

namespace ltx {
namespace {

constexpr int kH200 = 132;

// (tile_m, tile_n, cluster_m, split_k) of an SM90 kernel
using Shape = std::tuple<int, int, int, int>;

Shape chosen(int64_t m, int64_t n, int64_t k, int num_sms = kH200) {
  const auto config = fp8_gemm_config(m, n, k, num_sms, 90);
  return config ? Shape(config->tile_m, config->tile_n, config->cluster_m, config->split_k) : Shape();
}

TEST(Fp8GemmConfig, ChoosesWhatWasMeasuredFastest) {
  EXPECT_EQ(chosen(126, 4096, 4096), Shape(64, 64, 2, 1));     // 64 clusters of 2 blocks: one wave
  EXPECT_EQ(chosen(126, 2048, 2048), Shape(64, 64, 1, 2));     // 64 tiles: two blocks each
  EXPECT_EQ(chosen(126, 8192, 2048), Shape(64, 128, 2, 1));    // 64 clusters again, of larger tiles
  EXPECT_EQ(chosen(1, 4096, 4096), Shape(64, 64, 1, 2));       // no second block below the first
  EXPECT_EQ(chosen(1024, 2048, 2048), Shape(128, 128, 1, 1));  // 128 tiles: one wave
  EXPECT_EQ(chosen(4096, 4096, 4096), Shape(128, 256, 2, 1));
  EXPECT_EQ(chosen(32768, 4096, 4096), Shape(192, 128, 1, 1));
}

TEST(Fp8GemmConfig, CountsWavesOfTheDevice) {
  // 256 tiles of 128 x 128: two waves on 132 SMs, one on 264.
  EXPECT_EQ(chosen(2048, 2048, 2048, 264), Shape(128, 128, 1, 1));
  EXPECT_NE(chosen(2048, 2048, 2048, 132), Shape(128, 128, 1, 1));
  EXPECT_EQ(std::get<2>(chosen(4096, 4096, 4096, 1)), 1);  // one SM has no room for a cluster
}

// An L40S, by the model: 2048, 1024 and 512 cycles a k block.
TEST(Fp8GemmConfig, ChoosesSm89TilesByTheirWaves) {
  const auto chosen = [](int64_t m, int64_t n, int64_t k) {
    const auto config = fp8_gemm_config(m, n, k, 142, 89);
    return config ? std::pair(config->tile_m, config->tile_n) : std::pair(0, 0);
  };
  EXPECT_EQ(chosen(32768, 4096, 4096), std::pair(128, 128));  // many waves: the least overhead a product
  EXPECT_EQ(chosen(1024, 2048, 4096), std::pair(128, 128));   // 128 tiles, one wave; 256 smaller ones take two
  EXPECT_EQ(chosen(1024, 1024, 4096), std::pair(128, 64));    // 128 of these; 64 larger ones leave SMs idle
  EXPECT_EQ(chosen(1, 4096, 4096), std::pair(64, 64));        // one row of tiles
}

TEST(Fp8GemmConfig, HasTheKernelOfTheCapability) {
  for (const int capability : {89, 100, 120, 121}) {
    EXPECT_EQ(fp8_gemm_config(1024, 4096, 4096, 108, capability)->arch, 89) << capability;
  }
  EXPECT_EQ(fp8_gemm_config(1024, 4096, 4096, 108, 90)->arch, 90);
}

TEST(Fp8GemmConfig, HasNoneWithoutAKernel) {
  for (const int capability : {70, 80, 86, 87}) {
    EXPECT_FALSE(fp8_gemm_config(1024, 4096, 4096, 108, capability)) << capability;
  }
}

TEST(Fp8GemmConfig, EveryCandidateFitsIntoSharedMemory) {
  for (const auto& [config, block_cost, tile_cost] : kFp8GemmCandidates) {
    EXPECT_LE(fp8_gemm_sm90_shared_bytes(config), 232448) << config.tile_m << " x " << config.tile_n;
    EXPECT_GE(config.stages, 4);           // fewer do not hide the latency of device memory
    EXPECT_LE(config.tile_m / 64 + 1, 4);  // warpgroups: more find no registers
    EXPECT_GT(block_cost, 0);
    EXPECT_GE(tile_cost, 0);
  }
}

// 128 x 128: a stage has 32768 bytes of operands, 512 + 128 of scales; 8 warps store through 2 x 2048 bytes each;
// 128 stand for sums received, and 11 barriers of 8 bytes take 128.
TEST(Fp8GemmConfig, CountsSharedMemory) {
  EXPECT_EQ(fp8_gemm_sm90_shared_bytes({90, 128, 128, 5, 1, 1, 8}), 5 * (32768 + 640) + 32768 + 128 + 128);
  // Split: a block receives half of the tile's sums from the other one, 64 * 64 / 2 * 4 bytes.
  EXPECT_EQ(fp8_gemm_sm90_shared_bytes({90, 64, 64, 12, 1, 2, 8}), 12 * (16384 + 384) + 16384 + 8192 + 256);
}

// Ada and consumer Blackwell: 99 KB a block, 100 KB an SM of which each block takes 1 KB beside its own.
TEST(Fp8GemmConfig, Sm89FitsIntoTheSharedMemoryOf99KB) {
  EXPECT_EQ(fp8_gemm_sm89_shared_bytes({89, 128, 128, 3, 1, 1, 8}), 3 * (32768 + 512));
  EXPECT_EQ(fp8_gemm_sm89_shared_bytes({89, 128, 64, 4, 1, 1, 8}), 4 * (24576 + 512));
  EXPECT_EQ(fp8_gemm_sm89_shared_bytes({89, 64, 64, 3, 1, 1, 8}), 3 * (16384 + 256));
  for (const auto& [config, block_cost, tile_cost] : kFp8GemmSm89Candidates) {
    EXPECT_LE(fp8_gemm_sm89_shared_bytes(config), 101376);
  }
  EXPECT_LE(2 * (fp8_gemm_sm89_shared_bytes({89, 64, 64, 3, 1, 1, 8}) + 1024), 102400);
}

TEST(Fp8GemmConfig, TilesGoDownABandThenToItsNextColumn) {
  const auto places = [](int tiles_m, int tiles_n, int band) {
    std::string text;
    for (int i = 0; i < tiles_m * tiles_n; ++i) {
      const Fp8GemmTile tile = fp8_gemm_tile(i, tiles_m, tiles_n, band);
      text += " " + std::to_string(tile.m) + "," + std::to_string(tile.n);
    }
    return text;
  };
  EXPECT_EQ(places(3, 2, 2), " 0,0 1,0 0,1 1,1 2,0 2,1");
  EXPECT_EQ(places(1, 3, 1), " 0,0 0,1 0,2");
}

TEST(Fp8GemmConfig, EverySizeHasALegalOne) {
  constexpr std::array<int64_t, 14> kM = {0, 1, 2, 7, 63, 64, 65, 126, 129, 255, 1000, 4097, 32768, int64_t{1} << 30};
  constexpr std::array<int64_t, 8> kN = {8, 64, 120, 640, 2560, 4096, 5120, int64_t{1} << 30};
  constexpr std::array<int64_t, 9> kK = {16, 128, 144, 400, 640, 2048, 4096, 8192, int64_t{1} << 30};
  for (const int capability : {89, 90, 100, 120, 121}) {
    const auto candidates = fp8_gemm_candidates(capability == 90 ? 90 : 89);
    for (const int num_sms : {1, 2, 3, 78, 114, 142}) {
      for (const int64_t m : kM) {
        for (const int64_t n : kN) {
          for (const int64_t k : kK) {
            const auto config = fp8_gemm_config(m, n, k, num_sms, capability);
            ASSERT_TRUE(config);
            EXPECT_TRUE(std::ranges::any_of(candidates, [&](const auto& c) { return c.config == *config; }));
            EXPECT_LE(config->cluster_m * config->split_k, num_sms);
            EXPECT_GE((k + 127) / 128, config->split_k) << "a block without a k block";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ltx
