#include "blockwise/adanorm_quantize/adanorm_quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <vector>

#include "common/message_of.h"

namespace ltx {
namespace {

struct Result {
  std::array<uint8_t, 8> q{};
  std::array<float, 4> scales{};
};

// Four rows of two columns.
Result quantize(std::array<float, 8> x, const std::optional<TensorView>& w, TensorView scale, TensorView shift) {
  Result result;
  TensorView scales = contiguous_view<2>(result.scales.data(), DType::kFloat32, {4, 1});
  scales.strides = {1, 4};
  adanorm_quantize_cpu({.x = contiguous_view<3>(x.data(), DType::kFloat32, {2, 2, 2}),
                        .w = w,
                        .norm_scale = scale,
                        .norm_shift = shift,
                        .q = contiguous_view<3>(result.q.data(), DType::kFp8, {2, 2, 2}),
                        .scales = scales});
  return result;
}

TEST(AdanormQuantize, Formula) {
  // Rows of equal magnitude a have rstd 1 / sqrt(a^2 + 1e-5): v is 1 up to 5e-6 / a^2, before the modulation.
  std::array<float, 2> w{2.0f, 4.0f};
  std::array<float, 4> scale{0.0f, 0.0f, 1.0f, -1.0f};  // a batch each
  std::array<float, 4> shift{0.0f, 0.0f, -12.0f, 4.0f};
  const Result result = quantize({100, -100, 0, 0, 100, 100, 0, 0}, contiguous_view<1>(w.data(), DType::kFloat32, {2}),
                                 contiguous_view<3>(scale.data(), DType::kFloat32, {2, 1, 2}),
                                 contiguous_view<3>(shift.data(), DType::kFloat32, {2, 1, 2}));
  // 2, -4 | 0, 0 | 2 * 2 - 12, 4 | -12, 4, which is 149.3 of 448: 144
  EXPECT_EQ(result.q, (std::array<uint8_t, 8>{0x76, 0xFE, 0x00, 0x00, 0xFE, 0x76, 0xFE, 0x71}));
  EXPECT_NEAR(result.scales[0] * 448.0f, 4.0f, 1e-5);
  EXPECT_EQ(result.scales[1], 0x1p-117f / 448.0f);
  EXPECT_NEAR(result.scales[2] * 448.0f, 8.0f, 1e-5);
  EXPECT_EQ(result.scales[3], 12.0f / 448.0f);
}

TEST(AdanormQuantize, EpsIsOneInHundredThousand) {
  std::array<float, 2> zeros{};
  const TensorView none = contiguous_view<1>(zeros.data(), DType::kFloat32, {2});
  const float a = 0.00316227766f;  // a^2 = 1e-5: rstd halves it to a / sqrt(2e-5)
  const Result result = quantize({a, a, a, -a, a, a, a, a}, std::nullopt, none, none);
  EXPECT_NEAR(result.scales[0] * 448.0f, 0.70710678f, 1e-6);
  EXPECT_EQ(result.q[3], 0xFE);
}

TEST(AdanormQuantize, ARowThatOverflowsIsPoisonedAndNoOther) {
  std::array<float, 2> zeros{};
  const TensorView none = contiguous_view<1>(zeros.data(), DType::kFloat32, {2});
  const Result result = quantize({1e20f, 1, 1, 1, 1, 1, 1, 1}, std::nullopt, none, none);
  EXPECT_EQ(std::bit_cast<uint32_t>(result.scales[0]), 0x7FC00000u);
  EXPECT_EQ(result.q[0], 0x00);
  EXPECT_EQ(result.q[1], 0x00);
  EXPECT_NEAR(result.scales[1] * 448.0f, 1.0f, 1e-5);
}

TEST(AdanormQuantize, Refuses) {
  const AdanormQuantizeParams good{.x = contiguous_view<3>(nullptr, DType::kBFloat16, {2, 5, 8}),
                                   .w = contiguous_view<1>(nullptr, DType::kFloat32, {8}),
                                   .norm_scale = contiguous_view<3>(nullptr, DType::kBFloat16, {2, 1, 8}),
                                   .norm_shift = contiguous_view<3>(nullptr, DType::kBFloat16, {2, 5, 8}),
                                   .q = {},
                                   .scales = {}};
  const auto refusal = [&](auto change) {
    AdanormQuantizeParams params = good;
    change(params);
    return message_of([&] { adanorm_quantize_check(params); });
  };
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& params) { params.x.device.kind = Device::Kind::kOther; }),
            "adanorm_quantize: x must be on a CPU or a CUDA device, got another device");
  EXPECT_EQ(refusal([](auto& params) { params.x.dtype = DType::kInt8; }),
            "adanorm_quantize: x must be bfloat16, float16 or float32, got int8");
  EXPECT_EQ(refusal([](auto& params) { params.x.rank = 0; }),
            "adanorm_quantize: x must have 1 to 8 dimensions, got []");
  EXPECT_EQ(refusal([](auto& params) { params.x.strides[2] = 2; }),
            "adanorm_quantize: x must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& params) { params.w->device = {Device::Kind::kCuda, 0}; }),
            "adanorm_quantize: w must be on cpu like x, got cuda:0");
  EXPECT_EQ(refusal([](auto& params) { params.w->dtype = DType::kFp8; }),
            "adanorm_quantize: w must be bfloat16, float16 or float32, got float8_e4m3fn");
  EXPECT_EQ(refusal([](auto& params) { params.w->sizes[0] = 7; }), "adanorm_quantize: w must have shape [8], got [7]");
  EXPECT_EQ(refusal([](auto& params) { params.w->strides[0] = 2; }),
            "adanorm_quantize: w must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& params) { params.norm_scale.device = {Device::Kind::kCuda, 0}; }),
            "adanorm_quantize: norm_scale must be on cpu like x, got cuda:0");
  EXPECT_EQ(refusal([](auto& params) { params.norm_scale.dtype = DType::kInt32; }),
            "adanorm_quantize: norm_scale must be bfloat16, float16 or float32, got int32");
  EXPECT_EQ(refusal([](auto& params) { params.norm_scale.sizes[1] = 4; }),
            "adanorm_quantize: norm_scale must broadcast to [2, 5, 8] with a last size of 8, got [2, 4, 8]");
  EXPECT_EQ(refusal([](auto& params) { params.norm_shift.sizes[2] = 1; }),
            "adanorm_quantize: norm_shift must broadcast to [2, 5, 8] with a last size of 8, got [2, 5, 1]");
  EXPECT_EQ(refusal([](auto& params) { params.norm_shift.strides[2] = 2; }),
            "adanorm_quantize: norm_shift must have a contiguous last dimension, got stride 2");
}

}  // namespace
}  // namespace ltx
