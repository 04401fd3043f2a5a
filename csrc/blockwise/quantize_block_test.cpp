#include "blockwise/quantize_block.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <limits>
#include <vector>

#include "common/fp8.h"

namespace ltx {
namespace {

struct Block {
  std::vector<uint8_t> q;
  uint32_t scale_bits;
};

Block quantize(const std::vector<float>& x, float scale_max = kFp8Max) {
  const auto count = static_cast<int64_t>(x.size());
  const BlockScale scale = block_scale(amax_bits(x.data(), count), scale_max);
  Block block{.q = std::vector<uint8_t>(x.size(), 0xEE), .scale_bits = std::bit_cast<uint32_t>(scale.scale)};
  encode_block(x.data(), count, scale, block.q.data());
  return block;
}

TEST(QuantizeBlock, TiesGoToEven) {
  // amax 448: values stay as they are. 17 lies between 16 and 18, 19 between 18 and 20.
  const Block block = quantize({448.0f, -1.0f, 17.0f, 19.0f, -0.0f});
  EXPECT_EQ(block.q, (std::vector<uint8_t>{0x7E, 0xB8, 0x58, 0x5A, 0x80}));
  EXPECT_EQ(block.scale_bits, 0x3F800000u);
}

TEST(QuantizeBlock, LargestMagnitudeBecomes448) {
  const Block block = quantize({0.5f, -1.0f});  // 224 = 1.75 * 2^7, -448; 1/448 = 8/7 * 2^-9
  EXPECT_EQ(block.q, (std::vector<uint8_t>{0x76, 0xFE}));
  EXPECT_EQ(block.scale_bits, 0x3B124925u);
}

TEST(QuantizeBlock, Fp6RangeEndsAtItsLargestValue) {
  const Block block = quantize({-3.0f, 1.5f, 0.0f}, 0.1172f);  // -0.1172 rounds to -15/128; 0.0586 to 15/256
  EXPECT_EQ(block.q, (std::vector<uint8_t>{0x9F, 0x17, 0x00}));
}

TEST(QuantizeBlock, ZerosAndTinyValuesHaveAFiniteScale) {
  const uint32_t smallest_scale = std::bit_cast<uint32_t>(0x1p-117f / 448.0f);
  EXPECT_EQ(quantize({0.0f, 0.0f}).q, (std::vector<uint8_t>{0, 0}));
  EXPECT_EQ(quantize({0.0f, 0.0f}).scale_bits, smallest_scale);
  EXPECT_EQ(quantize({0x1p-149f, -0x1p-149f}).q, (std::vector<uint8_t>{0x00, 0x80}));
  EXPECT_EQ(quantize({0x1p-149f}).scale_bits, smallest_scale);
  EXPECT_EQ(quantize({0x1p-118f}).q, (std::vector<uint8_t>{0x76}));  // half the smallest amax: 224
  EXPECT_EQ(quantize({}).scale_bits, smallest_scale);
}

TEST(QuantizeBlock, LargestFiniteValue) {
  const float largest = std::numeric_limits<float>::max();
  const Block block = quantize({largest, -largest / 2});
  EXPECT_EQ(block.q, (std::vector<uint8_t>{0x7E, 0xF6}));
  EXPECT_EQ(block.scale_bits, std::bit_cast<uint32_t>(largest / 448.0f));
}

TEST(QuantizeBlock, NanOrInfinityPoisonsAll) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(), std::bit_cast<float>(0xFFFFFFFFu)}) {
    const Block block = quantize({1.0f, bad, -2.0f});
    EXPECT_EQ(block.q, (std::vector<uint8_t>{0, 0, 0}));
    EXPECT_EQ(block.scale_bits, 0x7FC00000u);
  }
}

TEST(QuantizeBlock, RowWithAPartialLastBlockAndPadding) {
  constexpr int64_t kRows = 5;
  constexpr int64_t kHidden = 130;
  std::vector<uint8_t> q(kRows * kHidden, 0xEE);
  std::vector<float> scales(2 * 8, -1.0f);
  TensorView scales_view = contiguous_view<2>(scales.data(), DType::kFloat32, {kRows, 2});
  scales_view.strides = {1, padded_rows(kRows)};
  std::vector<float> x(kHidden, 1.0f);
  x[128] = 4.0f;
  for (int64_t row = 0; row < kRows; ++row) {
    x[129] = static_cast<float>(row);
    quantize_row(x.data(), row, contiguous_view<2>(q.data(), DType::kFp8, {kRows, kHidden}), scales_view);
  }
  clear_padding(scales_view);
  const float first = 1.0f / 448.0f;
  const float second = 4.0f / 448.0f;
  EXPECT_EQ(scales, (std::vector<float>{first, first, first, first, first, 0, 0, 0,  //
                                        second, second, second, second, second, 0, 0, 0}));
  EXPECT_EQ(q[2 * kHidden + 127], 0x7E);
  EXPECT_EQ(q[2 * kHidden + 129], 0x76);  // 2 of 4: 224
}

}  // namespace
}  // namespace ltx
