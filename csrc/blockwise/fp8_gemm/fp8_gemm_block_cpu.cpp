#include "blockwise/fp8_gemm/fp8_gemm_block.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/fp6.h"
#include "common/fp8.h"

namespace ltx {

namespace {

constexpr int64_t kPanel = 32;   // columns of b that lie together: two AVX-512 registers
constexpr int64_t kRowStep = 4;  // rows are padded to a multiple
constexpr int64_t kVectors = 2;  // a row of sums that a kernel holds in registers

constexpr int64_t round_up(int64_t value, int64_t factor) { return (value + factor - 1) / factor * factor; }

// GCC and Clang compile arithmetic on these for the function that it is inlined into: one source for all kernels.
template <int kLanes>
struct Vector {
  using Type [[gnu::vector_size(kLanes * sizeof(float)), gnu::may_alias]] = float;
};

[[gnu::always_inline]] inline void decode_a(const Fp8GemmBlock& block, float* decoded) {
  for (int64_t row = 0; row < block.rows; ++row) {
    const uint8_t* codes = block.a + row * block.a_stride;
    for (int64_t i = 0; i < block.depth; ++i) decoded[row * kTileDepth + i] = decode_e4m3(codes[i]);
  }
  std::fill(decoded + block.rows * kTileDepth, decoded + round_up(block.rows, kRowStep) * kTileDepth, 0.0f);
}

// Into rows that lie together: at the stride of b, often a power of two, they would share a few sets of the cache.
[[gnu::always_inline]] inline void gather_b(const Fp8GemmBlock& block, uint8_t* codes) {
  for (int64_t column = 0; column < block.columns; ++column) {
    const uint8_t* from = block.b + column * block.b_stride;
    uint8_t* to = codes + column * kTileDepth;
    if (block.b_is_fp6) {
      for (int64_t i = 0; i < block.depth / 4; ++i) unpack_fp6(from + 3 * i, to + 4 * i);
    } else {
      std::memcpy(to, from, block.depth);
    }
  }
  std::fill(codes + block.columns * kTileDepth, codes + round_up(block.columns, kPanel) * kTileDepth, uint8_t{0});
}

// Transposes too: four bytes of a column at a time, so that most of the work is on vectors.
[[gnu::always_inline]] inline void decode_b(const Fp8GemmBlock& block, const uint8_t* codes, float* decoded) {
  static_assert(std::endian::native == std::endian::little);
  for (int64_t first = 0; first < block.columns; first += kPanel) {
    float* panel = decoded + first * kTileDepth;
    for (int64_t i = 0; i < block.depth; i += 4) {
      uint32_t words[kPanel];
      for (int64_t column = 0; column < kPanel; ++column) {
        std::memcpy(&words[column], codes + (first + column) * kTileDepth + i, sizeof(uint32_t));
      }
      for (int64_t byte = 0; byte < 4; ++byte) {
        float* row = panel + (i + byte) * kPanel;
        for (int64_t column = 0; column < kPanel; ++column) row[column] = decode_e4m3(words[column] >> 8 * byte);
      }
    }
  }
}

// kRows rows of a times one panel of b.
template <int kLanes, int kRows>
[[gnu::always_inline]] inline void multiply(const float* a, const float* panel, int64_t depth, float* sums) {
  using Float = typename Vector<kLanes>::Type;
  for (int64_t column = 0; column < kPanel; column += kVectors * kLanes) {
    Float sum[kRows][kVectors] = {};
    for (int64_t i = 0; i < depth; ++i) {
      Float b[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) {
        b[v] = *reinterpret_cast<const Float*>(panel + i * kPanel + column + v * kLanes);
      }
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t v = 0; v < kVectors; ++v) sum[row][v] += a[row * kTileDepth + i] * b[v];
      }
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < kVectors; ++v) {
        *reinterpret_cast<Float*>(sums + row * kTileColumns + column + v * kLanes) = sum[row][v];
      }
    }
  }
}

// As many sums as fit into the registers, kRows * kVectors, hide the latency of the additions.
template <int kLanes, int kRows>
[[gnu::always_inline]] inline void sum_block(const Fp8GemmBlock& block, Fp8GemmScratch& scratch) {
  decode_a(block, scratch.a);
  gather_b(block, scratch.b_codes);
  decode_b(block, scratch.b_codes, scratch.b);
  for (int64_t first = 0; first < block.columns; first += kPanel) {
    const float* panel = scratch.b + first * kTileDepth;
    int64_t row = 0;
    for (; row + kRows <= block.rows; row += kRows) {
      multiply<kLanes, kRows>(scratch.a + row * kTileDepth, panel, block.depth,
                              scratch.sums + row * kTileColumns + first);
    }
    for (; row < block.rows; row += kRowStep) {
      multiply<kLanes, kRowStep>(scratch.a + row * kTileDepth, panel, block.depth,
                                 scratch.sums + row * kTileColumns + first);
    }
  }
}

void sum_block_plain(const Fp8GemmBlock& block, Fp8GemmScratch& scratch) { sum_block<4, 4>(block, scratch); }

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void sum_block_avx2(const Fp8GemmBlock& block, Fp8GemmScratch& scratch) {
  sum_block<8, 4>(block, scratch);
}
[[gnu::target("avx512f")]] void sum_block_avx512(const Fp8GemmBlock& block, Fp8GemmScratch& scratch) {
  sum_block<16, 8>(block, scratch);
}
#endif

std::vector<Fp8GemmBlockKernel> find_kernels() {
  std::vector<Fp8GemmBlockKernel> kernels;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512", sum_block_avx512});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.push_back({"avx2", sum_block_avx2});
#endif
  kernels.push_back({"plain", sum_block_plain});
  return kernels;
}

}  // namespace

const std::vector<Fp8GemmBlockKernel>& fp8_gemm_block_kernels() {
  static const std::vector<Fp8GemmBlockKernel> kernels = find_kernels();
  return kernels;
}

}  // namespace ltx
