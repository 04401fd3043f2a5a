#include "blockwise/quantize/quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <vector>

#include "blockwise/quantize_block.h"
#include "common/message_of.h"

namespace ltx {
namespace {

TensorView scales_view(std::vector<float>& scales, int64_t rows, int64_t blocks) {
  TensorView view = contiguous_view<2>(scales.data(), DType::kFloat32, {rows, blocks});
  view.strides = {1, padded_rows(rows)};
  return view;
}

TEST(Quantize, FollowsTheStridesAndReadsNothingElse) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x{448.0f, -1.0f, kNan, kNan, 17.0f, 19.0f, kNan, kNan};
  TensorView view = contiguous_view<2>(x.data(), DType::kFloat32, {2, 2});
  view.strides[0] = 4;
  std::array<uint8_t, 4> q{};
  std::vector<float> scales(4, -1.0f);
  quantize_cpu({.x = view,
                .gelu = Gelu::kNone,
                .q = contiguous_view<2>(q.data(), DType::kFp8, {2, 2}),
                .scales = scales_view(scales, 2, 1)});
  EXPECT_EQ(q,
            (std::array<uint8_t, 4>{0x7E, 0xB8, 0x7D, 0x7E}));  // 17 * 448/19 = 400.8, above the middle of 384 and 416
  EXPECT_EQ(scales, (std::vector<float>{1.0f, 19.0f / 448.0f, 0.0f, 0.0f}));
}

TEST(Quantize, Gelu) {
  std::array<float, 2> x{1.0f, -2.0f};
  std::array<uint8_t, 2> q{};
  std::vector<float> scales(4);
  QuantizeParams params{.x = contiguous_view<1>(x.data(), DType::kFloat32, {2}),
                        .gelu = Gelu::kTanh,
                        .q = contiguous_view<1>(q.data(), DType::kFp8, {2}),
                        .scales = scales_view(scales, 1, 1)};
  quantize_cpu(params);
  EXPECT_NEAR(scales[0] * 448.0f, 0.84119199, 1e-6);
  EXPECT_EQ(q, (std::array<uint8_t, 2>{0x7E, 0xDC}));  // -0.04540231 is -24.2 in units of the scale: -24
  params.gelu = Gelu::kSigmoid;
  quantize_cpu(params);
  EXPECT_NEAR(scales[0] * 448.0f, 0.84579577, 1e-6);
  EXPECT_EQ(q, (std::array<uint8_t, 2>{0x7E, 0xE1}));  // -0.06434138: -34.1, below the middle of -32 and -36
}

TEST(Quantize, GeluOfHugeNumbersIsFinite) {
  std::array<float, 2> x{1e30f, -1e30f};
  for (const Gelu gelu : {Gelu::kTanh, Gelu::kSigmoid}) {
    std::array<uint8_t, 2> q{};
    std::vector<float> scales(4);
    quantize_cpu({.x = contiguous_view<1>(x.data(), DType::kFloat32, {2}),
                  .gelu = gelu,
                  .q = contiguous_view<1>(q.data(), DType::kFp8, {2}),
                  .scales = scales_view(scales, 1, 1)});
    EXPECT_EQ(q, (std::array<uint8_t, 2>{0x7E, 0x80}));
    EXPECT_EQ(scales[0], 1e30f / 448.0f);
  }
}

TEST(Quantize, Empty) {
  std::vector<float> none;
  for (const auto& [rows, hidden] : {std::array<int64_t, 2>{0, 128}, {5, 0}}) {
    quantize_cpu({.x = contiguous_view<2>(nullptr, DType::kFloat32, {rows, hidden}),
                  .gelu = Gelu::kNone,
                  .q = contiguous_view<2>(nullptr, DType::kFp8, {rows, hidden}),
                  .scales = scales_view(none, rows, num_blocks(hidden))});
  }
}

TEST(Quantize, Refuses) {
  const auto refusal = [](const TensorView& x) {
    return message_of([&] { quantize_check({.x = x, .gelu = Gelu::kNone, .q = {}, .scales = {}}); });
  };
  const TensorView good = contiguous_view<2>(nullptr, DType::kBFloat16, {2, 128});
  EXPECT_EQ(refusal(good), "no error");
  TensorView x = good;
  x.device.kind = Device::Kind::kOther;
  EXPECT_EQ(refusal(x), "quantize: x must be on a CPU or a CUDA device, got another device");
  x = good;
  x.dtype = DType::kFloat64;
  EXPECT_EQ(refusal(x), "quantize: x must be bfloat16, float16 or float32, got float64");
  EXPECT_EQ(refusal(contiguous_view<0>(nullptr, DType::kBFloat16, {})),
            "quantize: x must have 1 to 8 dimensions, got []");
  x = good;
  x.strides = {1, 2};
  EXPECT_EQ(refusal(x), "quantize: x must have a contiguous last dimension, got stride 2");
}

}  // namespace
}  // namespace ltx
