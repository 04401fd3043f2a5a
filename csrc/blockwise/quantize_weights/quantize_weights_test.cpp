#include "blockwise/quantize_weights/quantize_weights.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <limits>
#include <vector>

#include "common/message_of.h"

namespace ltx {
namespace {

TEST(QuantizeWeights, EachTileHasItsScale) {
  constexpr int64_t kOut = 129;
  constexpr int64_t kIn = 130;
  std::vector<float> w(kOut * kIn);  // four tiles; the second is zero
  w[0] = -1.0f;
  w[127 * kIn + 127] = 0.5f;
  w[128 * kIn] = 448.0f;
  w[128 * kIn + 127] = 17.0f;
  w[128 * kIn + 128] = std::numeric_limits<float>::quiet_NaN();
  w[128 * kIn + 129] = 1.0f;
  std::vector<uint8_t> q(w.size(), 0xEE);
  std::array<float, 4> scales{};
  quantize_weights_cpu({.w = contiguous_view<2>(w.data(), DType::kFloat32, {kOut, kIn}),
                        .block_size = 128,
                        .scale_max = 448.0,
                        .q = contiguous_view<2>(q.data(), DType::kFp8, {kOut, kIn}),
                        .scales = contiguous_view<2>(scales.data(), DType::kFloat32, {2, 2})});
  std::vector<uint8_t> expected(w.size());
  expected[0] = 0xFE;
  expected[127 * kIn + 127] = 0x76;
  expected[128 * kIn] = 0x7E;
  expected[128 * kIn + 127] = 0x58;
  EXPECT_EQ(q, expected);
  EXPECT_EQ(scales[0], 1.0f / 448.0f);
  EXPECT_EQ(scales[1], 0x1p-117f / 448.0f);
  EXPECT_EQ(scales[2], 1.0f);
  EXPECT_EQ(std::bit_cast<uint32_t>(scales[3]), 0x7FC00000u);
}

TEST(QuantizeWeights, Fp6RangeFollowsTheRowStride) {
  std::array<float, 6> w{1.0f, -0.5f, 9.0f, 0.25f, 0.0f, 9.0f};
  TensorView view = contiguous_view<2>(w.data(), DType::kFloat32, {2, 2});
  view.strides[0] = 3;
  std::array<uint8_t, 4> q{};
  float scale = 0;
  quantize_weights_cpu({.w = view,
                        .block_size = 128,
                        .scale_max = 0.1172,
                        .q = contiguous_view<2>(q.data(), DType::kFp8, {2, 2}),
                        .scales = contiguous_view<2>(&scale, DType::kFloat32, {1, 1})});
  EXPECT_EQ(q, (std::array<uint8_t, 4>{0x1F, 0x97, 0x0F, 0x00}));  // 15/128, -15/256, 15/512
  EXPECT_EQ(scale, 1.0f / 0.1172f);
}

TEST(QuantizeWeights, Empty) {
  for (const auto& [out, in] : {std::array<int64_t, 2>{0, 128}, {5, 0}}) {
    quantize_weights_cpu(
        {.w = contiguous_view<2>(nullptr, DType::kFloat32, {out, in}),
         .block_size = 128,
         .scale_max = 448.0,
         .q = contiguous_view<2>(nullptr, DType::kFp8, {out, in}),
         .scales = contiguous_view<2>(nullptr, DType::kFloat32, {(out + 127) / 128, (in + 127) / 128})});
  }
}

TEST(QuantizeWeights, Refuses) {
  const auto refusal = [](const TensorView& w, int64_t block_size = 128, double scale_max = 448.0) {
    return message_of([&] {
      quantize_weights_check({.w = w, .block_size = block_size, .scale_max = scale_max, .q = {}, .scales = {}});
    });
  };
  const TensorView good = contiguous_view<2>(nullptr, DType::kBFloat16, {2, 128});
  EXPECT_EQ(refusal(good), "no error");
  TensorView w = good;
  w.device.kind = Device::Kind::kOther;
  EXPECT_EQ(refusal(w), "quantize_weights: w must be on a CPU or a CUDA device, got another device");
  w = good;
  w.dtype = DType::kFp8;
  EXPECT_EQ(refusal(w), "quantize_weights: w must be bfloat16, float16 or float32, got float8_e4m3fn");
  EXPECT_EQ(refusal(contiguous_view<1>(nullptr, DType::kBFloat16, {128})),
            "quantize_weights: w must have 2 dimensions, got [128]");
  w = good;
  w.strides = {1, 2};
  EXPECT_EQ(refusal(w), "quantize_weights: w must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal(good, 64), "quantize_weights: block_size must be 128, got 64");
  EXPECT_EQ(refusal(good, 128, 0.0), "quantize_weights: scale_max must be > 0 and at most 448, got 0");
  EXPECT_EQ(refusal(good, 128, 449.0), "quantize_weights: scale_max must be > 0 and at most 448, got 449");
  EXPECT_EQ(refusal(good, 128, std::numeric_limits<double>::quiet_NaN()),
            "quantize_weights: scale_max must be > 0 and at most 448, got nan");
}

}  // namespace
}  // namespace ltx
