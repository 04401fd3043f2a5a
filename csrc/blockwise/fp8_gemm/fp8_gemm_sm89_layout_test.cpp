#include "blockwise/fp8_gemm/fp8_gemm_sm89_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <vector>

// The kernel's way through shared memory, on a CPU. ldmatrix and mma do here what the PTX manual says (sections on
// ldmatrix and on the fragments of mma.m16n8k32 with 8-bit elements).
namespace ltx {
namespace {

constexpr int kLanes = 32;
constexpr int kRowBytes = 128;
constexpr int kThreadsOfAnAccess = 8;  // that shared memory serves together at 16 bytes each

using Matrix = std::vector<std::array<int, kRowBytes>>;  // [rows][k]
using Registers = std::array<std::array<int, 4>, 4>;     // of a lane: [matrix][byte]

Matrix make_matrix(int rows, int seed) {
  Matrix matrix(rows);
  uint32_t state = seed;
  for (auto& row : matrix) {
    for (int& value : row) {
      state = state * 1664525 + 1013904223;
      value = static_cast<int>(state >> 24) - 128;
    }
  }
  return matrix;
}

template <class Offset>
std::vector<int> copy_in(const Fp8GemmConfig& config, const Matrix& from, const Offset& offset) {
  std::vector<int> memory(from.size() * kRowBytes);
  std::vector<int> written(memory.size());
  for (int thread = 0; thread < sm89_threads(config); ++thread) {
    const auto [first, chunk] = sm89_copy_place(thread);
    for (int row = first; row < static_cast<int>(from.size()); row += sm89_copy_rows(config)) {
      // The kernel adds the rows' distance to the first one's offset.
      const int to = offset(first, chunk) + (row - first) * kRowBytes;
      EXPECT_EQ(to % 16, 0);
      for (int byte = 0; byte < 16; ++byte) {
        memory.at(to + byte) = from[row][chunk * 16 + byte];
        ++written.at(to + byte);
      }
    }
  }
  EXPECT_EQ(written, std::vector<int>(written.size(), 1));
  return memory;
}

// How many different banks of 16 bytes the lanes of one access reach.
int num_banks(const std::array<int, kLanes>& addresses, int first) {
  std::set<int> banks;
  for (int i = 0; i < kThreadsOfAnAccess; ++i) banks.insert(addresses.at(first + i) / 16 % 8);
  return static_cast<int>(banks.size());
}

std::array<Registers, kLanes> load_matrices(const std::vector<int>& memory, const std::array<int, kLanes>& addresses) {
  std::array<Registers, kLanes> loaded;
  for (int matrix = 0; matrix < 4; ++matrix) {
    EXPECT_EQ(num_banks(addresses, 8 * matrix), 8);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int byte = 0; byte < 4; ++byte) {
        loaded[lane][matrix][byte] = memory.at(addresses.at(8 * matrix + lane / 4) + lane % 4 * 4 + byte);
      }
    }
  }
  return loaded;
}

using Sums = std::array<std::array<int, 4>, kLanes>;

void mma(Sums& sums, const std::array<Registers, kLanes>& a, const std::array<Registers, kLanes>& b, int b_first) {
  int full_a[16][32];
  int full_b[8][32];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int byte = 0; byte < 4; ++byte) {
      const int k = lane % 4 * 4 + byte;
      for (int i = 0; i < 4; ++i) full_a[lane / 4 + i % 2 * 8][k + i / 2 * 16] = a[lane][i][byte];
      for (int i = 0; i < 2; ++i) full_b[lane / 4][k + i * 16] = b[lane][b_first + i][byte];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 32; ++k) {
        sums[lane][i] += full_a[lane / 4 + i / 2 * 8][k] * full_b[lane % 4 * 2 + i % 2][k];
      }
    }
  }
}

class Sm89Layout : public testing::TestWithParam<Fp8GemmCandidate> {};

TEST_P(Sm89Layout, EveryElementOfATileIsTheProductAndStoredOnce) {
  const Fp8GemmConfig& config = GetParam().config;
  const Matrix a = make_matrix(config.tile_m, 1);
  const Matrix b = make_matrix(config.tile_n, 2);
  const std::vector<int> a_memory = copy_in(config, a, sm89_a_offset);
  const std::vector<int> b_memory = copy_in(config, b, sm89_b_offset);
  std::vector<int> stored(config.tile_m * config.tile_n);
  for (int warp = 0; warp < sm89_threads(config) / kLanes; ++warp) {
    const Sm89Place of_warp = sm89_warp_place(warp, config.tile_n / kSm89WarpColumns, sm89_warp_rows(config));
    for (int i = 0; i < sm89_warp_rows(config); i += 16) {
      for (int j = 0; j < kSm89WarpColumns; j += 16) {
        std::array<Sums, 2> sums{};
        for (int step = 0; step < 4; ++step) {
          std::array<int, kLanes> a_addresses;
          std::array<int, kLanes> b_addresses;
          for (int lane = 0; lane < kLanes; ++lane) {
            const Sm89Place a_lane = sm89_a_lane(lane);
            const Sm89Place b_lane = sm89_b_lane(lane);
            a_addresses[lane] =
                sm89_step(of_warp.row * kRowBytes + sm89_a_offset(a_lane.row, a_lane.column), step) + i * kRowBytes;
            b_addresses[lane] =
                sm89_step(of_warp.column * kRowBytes + sm89_b_offset(b_lane.row, b_lane.column), step) + j * kRowBytes;
          }
          const auto a_registers = load_matrices(a_memory, a_addresses);
          const auto b_registers = load_matrices(b_memory, b_addresses);
          for (int of_pair = 0; of_pair < 2; ++of_pair) mma(sums[of_pair], a_registers, b_registers, 2 * of_pair);
        }
        for (int lane = 0; lane < kLanes; ++lane) {
          for (int half = 0; half < 2; ++half) {
            const Sm89Place place = sm89_out_lane(lane, half);
            for (int c = 0; c < 4; ++c) {
              const int row = of_warp.row + i + place.row;
              const int column = of_warp.column + j + place.column + c;
              int expected = 0;
              for (int k = 0; k < kRowBytes; ++k) expected += a.at(row)[k] * b.at(column)[k];
              ASSERT_EQ(sums[c / 2][lane][2 * half + c % 2], expected) << row << ", " << column;
              ++stored.at(row * config.tile_n + column);
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(stored, std::vector<int>(stored.size(), 1));
}

TEST_P(Sm89Layout, CopiesHaveNoBankConflicts) {
  for (int first = 0; first < sm89_threads(GetParam().config); first += kLanes) {
    std::array<int, kLanes> a;
    std::array<int, kLanes> b;
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto [row, chunk] = sm89_copy_place(first + lane);
      a[lane] = sm89_a_offset(row, chunk);
      b[lane] = sm89_b_offset(row, chunk);
    }
    for (int i = 0; i < kLanes; i += kThreadsOfAnAccess) {
      EXPECT_EQ(num_banks(a, i), 8);
      EXPECT_EQ(num_banks(b, i), 8);
    }
  }
}

TEST_P(Sm89Layout, FourLanesOfARowStoreAWholeSectorOf16BitValues) {
  for (int lane = 0; lane < kLanes; lane += 4) {
    for (int half = 0; half < 2; ++half) {
      const Sm89Place first = sm89_out_lane(lane, half);
      EXPECT_EQ(first.column * 2 % 32, 0);
      for (int i = 1; i < 4; ++i) EXPECT_EQ(sm89_out_lane(lane + i, half), (Sm89Place{first.row, 4 * i}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Candidates, Sm89Layout, testing::ValuesIn(kFp8GemmSm89Candidates));

}  // namespace
}  // namespace ltx
