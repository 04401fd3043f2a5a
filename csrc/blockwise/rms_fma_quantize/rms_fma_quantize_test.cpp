#include "blockwise/rms_fma_quantize/rms_fma_quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <vector>

#include "common/message_of.h"

namespace ltx {
namespace {

TEST(RmsFma, UpdatesXAndReturnsItsNorm) {
  std::array<float, 4> x{1, 2, 5, 5};  // one row of two in a batch each
  std::array<float, 4> y{2, 2, 1, 1};
  std::array<float, 2> z{1, -0.5f};
  std::array<uint16_t, 4> out{};
  rms_fma_cpu({.x = contiguous_view<3>(x.data(), DType::kFloat32, {2, 1, 2}),
               .y = contiguous_view<3>(y.data(), DType::kFloat32, {2, 1, 2}),
               .z = contiguous_view<1>(z.data(), DType::kFloat32, {2}),
               .out = contiguous_view<3>(out.data(), DType::kBFloat16, {2, 1, 2})});
  EXPECT_EQ(x, (std::array<float, 4>{3, 1, 6, 4.5f}));
  // Means of squares 5 and 28.125: 3 / 2.2360 = 1.3416, 0.44721; 6 / 5.3033 = 1.1314, 0.84853
  EXPECT_EQ(out, (std::array<uint16_t, 4>{0x3FAC, 0x3EE5, 0x3F91, 0x3F59}));
}

TEST(RmsFma, MultipliesAndAddsWithOneRounding) {
  // (1 + 2^-12)^2 - 1 = 2^-11 + 2^-24: two roundings would lose the last term.
  std::array<float, 1> x{-1};
  std::array<float, 1> y{1 + 0x1p-12f};
  std::array<uint16_t, 1> out{};
  rms_fma_cpu({.x = contiguous_view<1>(x.data(), DType::kFloat32, {1}),
               .y = contiguous_view<1>(y.data(), DType::kFloat32, {1}),
               .z = contiguous_view<1>(y.data(), DType::kFloat32, {1}),
               .out = contiguous_view<1>(out.data(), DType::kBFloat16, {1})});
  EXPECT_EQ(x[0], 0x1p-11f + 0x1p-24f);
}

TEST(RmsFmaQuantize, NormReadsTheRoundedX) {
  // 256 + 1 = 257 is a tie in bf16 and becomes 256: then the row is 256, 256 and its norm 1, 1.
  std::array<uint16_t, 2> x{0x4380, 0x4380};
  std::array<float, 2> y{1, 0};
  std::array<float, 2> z{1, 1};
  std::array<uint8_t, 2> q{};
  std::array<float, 4> padded_scales{-1, -1, -1, -1};
  TensorView scales = contiguous_view<2>(padded_scales.data(), DType::kFloat32, {1, 1});
  scales.strides = {1, 4};
  rms_fma_quantize_cpu({.x = contiguous_view<1>(x.data(), DType::kBFloat16, {2}),
                        .y = contiguous_view<1>(y.data(), DType::kFloat32, {2}),
                        .z = contiguous_view<1>(z.data(), DType::kFloat32, {2}),
                        .q = contiguous_view<1>(q.data(), DType::kFp8, {2}),
                        .scales = scales});
  EXPECT_EQ(x, (std::array<uint16_t, 2>{0x4380, 0x4380}));
  EXPECT_EQ(q, (std::array<uint8_t, 2>{0x7E, 0x7E}));
  EXPECT_EQ(padded_scales, (std::array<float, 4>{1.0f / 448.0f, 0, 0, 0}));
}

TEST(RmsFmaQuantize, EpsIsOneInAMillion) {
  std::array<float, 1> x{0.001f};  // x^2 = 1e-6
  std::array<float, 1> zero{};
  std::array<uint8_t, 1> q{};
  std::array<float, 4> padded_scales{};
  TensorView scales = contiguous_view<2>(padded_scales.data(), DType::kFloat32, {1, 1});
  scales.strides = {1, 4};
  const TensorView none = contiguous_view<1>(zero.data(), DType::kFloat32, {1});
  rms_fma_quantize_cpu({.x = contiguous_view<1>(x.data(), DType::kFloat32, {1}),
                        .y = none,
                        .z = none,
                        .q = contiguous_view<1>(q.data(), DType::kFp8, {1}),
                        .scales = scales});
  EXPECT_NEAR(padded_scales[0] * 448.0f, 0.70710678f, 1e-6);
}

TEST(RmsFma, RefusesWhatRmsFmaQuantizeRefuses) {
  std::array<uint16_t, 256> memory{};
  const RmsFmaParams good{.x = contiguous_view<3>(memory.data(), DType::kBFloat16, {2, 5, 8}),
                          .y = contiguous_view<3>(memory.data() + 80, DType::kBFloat16, {2, 5, 8}),
                          .z = contiguous_view<3>(memory.data() + 160, DType::kBFloat16, {2, 1, 8}),
                          .out = {}};
  const auto refusal = [&](auto change) {
    RmsFmaParams params = good;
    change(params);
    const std::string text = message_of([&] { rms_fma_check(params); });
    const std::string quantize_text = message_of(
        [&] { rms_fma_quantize_check({.x = params.x, .y = params.y, .z = params.z, .q = {}, .scales = {}}); });
    if (text == "no error") {
      EXPECT_EQ(quantize_text, text);
      return text;
    }
    EXPECT_EQ(text.substr(0, 9), "rms_fma: ");
    EXPECT_EQ(quantize_text, "rms_fma_quantize: " + text.substr(9));
    return text.substr(9);
  };
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& params) { params.x.device.kind = Device::Kind::kOther; }),
            "x must be on a CPU or a CUDA device, got another device");
  EXPECT_EQ(refusal([](auto& params) { params.x.dtype = DType::kFp8; }),
            "x must be bfloat16, float16 or float32, got float8_e4m3fn");
  EXPECT_EQ(refusal([](auto& params) { params.x.rank = 0; }), "x must have 1 to 8 dimensions, got []");
  EXPECT_EQ(refusal([](auto& params) { params.x.strides[2] = 2; }),
            "x must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& params) { params.y.device = {Device::Kind::kCuda, 2}; }),
            "y must be on cpu like x, got cuda:2");
  EXPECT_EQ(refusal([](auto& params) { params.y.dtype = DType::kInt16; }),
            "y must be bfloat16, float16 or float32, got int16");
  EXPECT_EQ(refusal([](auto& params) { params.y.sizes[1] = 1; }), "y must have shape [2, 5, 8] like x, got [2, 1, 8]");
  EXPECT_EQ(refusal([](auto& params) { params.y.strides[2] = 2; }),
            "y must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& params) { params.z.sizes[0] = 3; }),
            "z must broadcast to [2, 5, 8] with a last size of 8, got [3, 1, 8]");
  EXPECT_EQ(refusal([](auto& params) { params.x.strides[0] = 0; }),
            "x must not overlap itself, got sizes [2, 5, 8] with strides [0, 8, 1]");
  EXPECT_EQ(refusal([&](auto& params) { params.y.data = memory.data() + 79; }),
            "y must not overlap x, got one that shares memory with it");
  EXPECT_EQ(refusal([&](auto& params) { params.z.data = memory.data() + 72; }),
            "z must not overlap x, got one that shares memory with it");
}

}  // namespace
}  // namespace ltx
