#include "blockwise/dequantize/dequantize.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <vector>

#include "common/message_of.h"

namespace ltx {
namespace {

TEST(Dequantize, ProductIsRoundedToBf16) {
  // 1, -448, NaN; 1.125 * 1.0078125 = 1.1337890625, the middle of 1.1328125 (even) and 1.140625 is above it.
  std::array<uint8_t, 4> q{0x38, 0xFE, 0xFF, 0x39};
  float scale = 1.0078125f;
  std::array<uint16_t, 4> out{};
  dequantize_cpu({.q = contiguous_view<1>(q.data(), DType::kFp8, {4}),
                  .scales = contiguous_view<1>(&scale, DType::kFloat32, {1}),
                  .out = contiguous_view<1>(out.data(), DType::kBFloat16, {4})});
  EXPECT_EQ(out, (std::array<uint16_t, 4>{0x3F81, 0xC3E2, 0x7FC0, 0x3F91}));  // -451.5: a tie, -452 is even
}

TEST(Dequantize, ColumnMajorScalesAndAPartialBlock) {
  std::vector<uint8_t> q(2 * 129, 0x38);
  std::array<float, 8> scales{1, 2, -1, -1, 3, std::numeric_limits<float>::quiet_NaN(), -1, -1};
  TensorView view = contiguous_view<2>(scales.data(), DType::kFloat32, {2, 2});
  view.strides = {1, 4};
  std::vector<uint16_t> out(2 * 129);
  dequantize_cpu({.q = contiguous_view<2>(q.data(), DType::kFp8, {2, 129}),
                  .scales = view,
                  .out = contiguous_view<2>(out.data(), DType::kBFloat16, {2, 129})});
  EXPECT_EQ(out[0], 0x3F80);
  EXPECT_EQ(out[127], 0x3F80);
  EXPECT_EQ(out[128], 0x4040);
  EXPECT_EQ(out[129], 0x4000);
  EXPECT_EQ(out[256], 0x4000);
  EXPECT_EQ(out[257], 0x7FC0);
}

TEST(DequantizeWeights, OneScaleATile) {
  std::vector<uint8_t> q(129 * 130, 0x38);
  std::array<float, 4> scales{1, 2, 3, 4};
  std::vector<uint16_t> out(129 * 130);
  dequantize_weights_cpu({.q = contiguous_view<2>(q.data(), DType::kFp8, {129, 130}),
                          .scales = contiguous_view<2>(scales.data(), DType::kFloat32, {2, 2}),
                          .out = contiguous_view<2>(out.data(), DType::kBFloat16, {129, 130})});
  EXPECT_EQ(out[127 * 130 + 127], 0x3F80);
  EXPECT_EQ(out[127 * 130 + 128], 0x4000);
  EXPECT_EQ(out[128 * 130 + 127], 0x4040);
  EXPECT_EQ(out[128 * 130 + 128], 0x4080);
}

TEST(Dequantize, Empty) {
  for (const auto& [rows, hidden] : {std::array<int64_t, 2>{0, 128}, {5, 0}}) {
    const TensorView q = contiguous_view<2>(nullptr, DType::kFp8, {rows, hidden});
    const TensorView scales = contiguous_view<2>(nullptr, DType::kFloat32, {rows, hidden / 128});
    dequantize_cpu({.q = q, .scales = scales, .out = contiguous_view<2>(nullptr, DType::kBFloat16, {rows, hidden})});
  }
}

TEST(Dequantize, TakesScalesByRowOrInTheShapeOfQ) {
  const TensorView q = contiguous_view<3>(nullptr, DType::kFp8, {2, 3, 200});
  const auto refusal = [&](const TensorView& scales) {
    return message_of([&] { dequantize_check({.q = q, .scales = scales, .out = {}}); });
  };
  EXPECT_EQ(refusal(contiguous_view<2>(nullptr, DType::kFloat32, {6, 2})), "no error");
  EXPECT_EQ(refusal(contiguous_view<3>(nullptr, DType::kBFloat16, {2, 3, 2})), "no error");
  EXPECT_EQ(refusal(contiguous_view<3>(nullptr, DType::kFloat32, {3, 2, 2})),
            "dequantize: scales must have shape [6, 2] or [2, 3, 2], got [3, 2, 2]");
  EXPECT_EQ(refusal(contiguous_view<2>(nullptr, DType::kFloat32, {6, 1})),
            "dequantize: scales must have shape [6, 2] or [2, 3, 2], got [6, 1]");
  EXPECT_EQ(refusal(contiguous_view<2>(nullptr, DType::kFloat32, {8, 2})),
            "dequantize: scales must have shape [6, 2] or [2, 3, 2], got [8, 2]");
}

TEST(Dequantize, Refuses) {
  const TensorView good_q = contiguous_view<2>(nullptr, DType::kFp8, {2, 128});
  const TensorView good_scales = contiguous_view<2>(nullptr, DType::kFloat32, {2, 1});
  const auto refusal = [](const TensorView& q, const TensorView& scales) {
    return message_of([&] { dequantize_check({.q = q, .scales = scales, .out = {}}); });
  };
  EXPECT_EQ(refusal(good_q, good_scales), "no error");
  TensorView q = good_q;
  q.device.kind = Device::Kind::kOther;
  EXPECT_EQ(refusal(q, good_scales), "dequantize: q must be on a CPU or a CUDA device, got another device");
  TensorView scales = good_scales;
  scales.device = {Device::Kind::kCuda, 1};
  EXPECT_EQ(refusal(good_q, scales), "dequantize: scales must be on cpu like q, got cuda:1");
  q = good_q;
  q.dtype = DType::kFp8E5m2;
  EXPECT_EQ(refusal(q, good_scales), "dequantize: q must be float8_e4m3fn, got float8_e5m2");
  scales = good_scales;
  scales.dtype = DType::kUint8;
  EXPECT_EQ(refusal(good_q, scales), "dequantize: scales must be bfloat16, float16 or float32, got uint8");
  EXPECT_EQ(refusal(contiguous_view<0>(nullptr, DType::kFp8, {}), good_scales),
            "dequantize: q must have 1 to 8 dimensions, got []");
  EXPECT_EQ(refusal(good_q, contiguous_view<2>(nullptr, DType::kFloat32, {3, 1})),
            "dequantize: scales must have shape [2, 1], got [3, 1]");
  q = good_q;
  q.strides = {1, 2};
  EXPECT_EQ(refusal(q, good_scales), "dequantize: q must have a contiguous last dimension, got stride 2");
}

TEST(DequantizeWeights, Refuses) {
  const TensorView good_q = contiguous_view<2>(nullptr, DType::kFp8, {129, 128});
  const TensorView good_scales = contiguous_view<2>(nullptr, DType::kFloat32, {2, 1});
  const auto refusal = [](const TensorView& q, const TensorView& scales) {
    return message_of([&] { dequantize_weights_check({.q = q, .scales = scales, .out = {}}); });
  };
  EXPECT_EQ(refusal(good_q, good_scales), "no error");
  TensorView q = good_q;
  q.dtype = DType::kUint8;
  EXPECT_EQ(refusal(q, good_scales), "dequantize_weights: q must be float8_e4m3fn, got uint8");
  EXPECT_EQ(refusal(contiguous_view<3>(nullptr, DType::kFp8, {1, 129, 128}), good_scales),
            "dequantize_weights: q must have 2 dimensions, got [1, 129, 128]");
  EXPECT_EQ(refusal(good_q, contiguous_view<2>(nullptr, DType::kFloat32, {129, 1})),
            "dequantize_weights: scales must have shape [2, 1], got [129, 1]");
  q = good_q;
  q.strides = {1, 129};
  EXPECT_EQ(refusal(q, good_scales), "dequantize_weights: q must have a contiguous last dimension, got stride 129");
}

}  // namespace
}  // namespace ltx
