#include "ops/rms_norm_rope/rms_norm_rope.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <vector>

#include "common/message_of.h"

namespace ltx {
namespace {

constexpr double kNoEps = 1e-30;

// bf16 bits of the numbers below
constexpr uint16_t kHalf = 0x3F00;
constexpr uint16_t kOne = 0x3F80;
constexpr uint16_t kTwo = 0x4000;
constexpr uint16_t kThree = 0x4040;
constexpr uint16_t kFive = 0x40A0;
constexpr uint16_t kSeven = 0x40E0;
constexpr uint16_t kNan = 0x7FC0;
constexpr uint16_t kMinus = 0x8000;

TEST(RmsNormRope, ATableValueForEachElement) {
  std::array<float, 4> x{2, 2, 2, -2};  // rms 2: v = 1 3 1 -1 with the weights
  std::array<float, 4> weights{1, 3, 1, 1};
  std::array<float, 4> cos{2, 3, 1, 2};
  std::array<float, 4> sin{1, -2, 0, 1};
  std::array<uint16_t, 4> out{};
  rms_norm_rope_cpu({.x = contiguous_view<2>(x.data(), DType::kFloat32, {1, 4}),
                     .cos_freqs = contiguous_view<2>(cos.data(), DType::kFloat32, {1, 4}),
                     .sin_freqs = contiguous_view<2>(sin.data(), DType::kFloat32, {1, 4}),
                     .weights = contiguous_view<1>(weights.data(), DType::kFloat32, {4}),
                     .eps = kNoEps,
                     .out = contiguous_view<2>(out.data(), DType::kBFloat16, {1, 4})});
  // 1 * 2 - 3 * 1;  3 * 3 + 1 * -2;  1 * 1 + 1 * 0;  -1 * 2 + 1 * 1
  EXPECT_EQ(out, (std::array<uint16_t, 4>{kMinus | kOne, kSeven, kOne, kMinus | kOne}));
}

TEST(RmsNormRope, ATableValueForEachPairSharedByTwoStridedRows) {
  std::array<float, 8> x{2, 2, 99, 99, 4, -4, 99, 99};  // rows of 2, 4 apart
  TensorView x_view = contiguous_view<2>(x.data(), DType::kFloat32, {2, 2});
  x_view.strides[0] = 4;
  std::array<float, 1> cos{3};
  std::array<float, 1> sin{2};
  std::array<uint16_t, 4> out{};
  rms_norm_rope_cpu({.x = x_view,
                     .cos_freqs = contiguous_view<1>(cos.data(), DType::kFloat32, {1}),
                     .sin_freqs = contiguous_view<1>(sin.data(), DType::kFloat32, {1}),
                     .weights = {},
                     .eps = kNoEps,
                     .out = contiguous_view<2>(out.data(), DType::kBFloat16, {2, 2})});
  // v = 1 1, then 1 -1: 3 - 2, 3 + 2;  3 + 2, -3 + 2
  EXPECT_EQ(out, (std::array<uint16_t, 4>{kOne, kFive, kFive, kMinus | kOne}));
}

TEST(RmsNormRope, EpsIsAddedToTheMeanOfSquares) {
  std::array<float, 2> x{1, 1};
  std::array<float, 2> ones{1, 1};
  std::array<float, 2> zeros{};
  std::array<uint16_t, 2> out{};
  rms_norm_rope_cpu({.x = contiguous_view<1>(x.data(), DType::kFloat32, {2}),
                     .cos_freqs = contiguous_view<1>(ones.data(), DType::kFloat32, {2}),
                     .sin_freqs = contiguous_view<1>(zeros.data(), DType::kFloat32, {2}),
                     .weights = {},
                     .eps = 3,
                     .out = contiguous_view<1>(out.data(), DType::kBFloat16, {2})});
  EXPECT_EQ(out, (std::array<uint16_t, 2>{kHalf, kHalf}));
}

TEST(RmsNormRope, ZeroRowsGiveZerosAndOverflowingOnesNan) {
  std::array<float, 6> x{0, 0, 2e19f, 2e19f, 1, std::numeric_limits<float>::infinity()};
  std::array<float, 2> ones{1, 1};
  std::array<uint16_t, 6> out{};
  NormRopeParams params{.x = contiguous_view<2>(x.data(), DType::kFloat32, {3, 2}),
                        .cos_freqs = contiguous_view<1>(ones.data(), DType::kFloat32, {2}),
                        .sin_freqs = contiguous_view<1>(ones.data(), DType::kFloat32, {2}),
                        .weights = {},
                        .eps = 1e-6,
                        .out = contiguous_view<2>(out.data(), DType::kBFloat16, {3, 2})};
  rms_norm_rope_cpu(params);
  EXPECT_EQ(out, (std::array<uint16_t, 6>{0, 0, kNan, kNan, kNan, kNan}));
  std::array<uint8_t, 6> fp8{};
  params.out = contiguous_view<2>(fp8.data(), DType::kFp8, {3, 2});
  rms_norm_rope_cpu(params);
  EXPECT_EQ(fp8, (std::array<uint8_t, 6>{0, 0, 0x7F, 0x7F, 0x7F, 0x7F}));
}

TEST(RmsNormRope, Fp8Saturates) {
  std::array<float, 2> x{1, -1};
  std::array<float, 2> large{1000, 1000};
  std::array<float, 2> zeros{};
  std::array<uint8_t, 2> out{};
  rms_norm_rope_cpu({.x = contiguous_view<1>(x.data(), DType::kFloat32, {2}),
                     .cos_freqs = contiguous_view<1>(large.data(), DType::kFloat32, {2}),
                     .sin_freqs = contiguous_view<1>(zeros.data(), DType::kFloat32, {2}),
                     .weights = {},
                     .eps = kNoEps,
                     .out = contiguous_view<1>(out.data(), DType::kFp8, {2})});
  EXPECT_EQ(out, (std::array<uint8_t, 2>{0x7E, 0xFE}));
}

TEST(RmsNormRope, NoRows) {
  const TensorView table = contiguous_view<1>(nullptr, DType::kFloat32, {4});
  rms_norm_rope_cpu({.x = contiguous_view<2>(nullptr, DType::kFloat32, {0, 4}),
                     .cos_freqs = table,
                     .sin_freqs = table,
                     .weights = {},
                     .eps = 1e-6,
                     .out = contiguous_view<2>(nullptr, DType::kBFloat16, {0, 4})});
}

TEST(RmsNormRopeQk, EachTensorHasItsWeightsAndTables) {
  std::array<float, 2> q{2, 2};
  std::array<float, 2> k{3, -3};
  std::array<float, 2> q_weights{1, 2};
  std::array<float, 2> cos{1, 1};
  std::array<float, 2> sin{0, 0};
  std::array<float, 1> k_cos{2};
  std::array<float, 1> k_sin{1};
  std::array<uint16_t, 2> q_out{};
  std::array<uint16_t, 2> k_out{};
  rms_norm_rope_qk_cpu({.q = {.x = contiguous_view<1>(q.data(), DType::kFloat32, {2}),
                              .cos_freqs = contiguous_view<1>(cos.data(), DType::kFloat32, {2}),
                              .sin_freqs = contiguous_view<1>(sin.data(), DType::kFloat32, {2}),
                              .weights = contiguous_view<1>(q_weights.data(), DType::kFloat32, {2}),
                              .eps = kNoEps,
                              .out = contiguous_view<1>(q_out.data(), DType::kBFloat16, {2})},
                        .k = {.x = contiguous_view<1>(k.data(), DType::kFloat32, {2}),
                              .cos_freqs = contiguous_view<1>(k_cos.data(), DType::kFloat32, {1}),
                              .sin_freqs = contiguous_view<1>(k_sin.data(), DType::kFloat32, {1}),
                              .weights = {},
                              .eps = kNoEps,
                              .out = contiguous_view<1>(k_out.data(), DType::kBFloat16, {2})}});
  EXPECT_EQ(q_out, (std::array<uint16_t, 2>{kOne, kTwo}));
  EXPECT_EQ(k_out, (std::array<uint16_t, 2>{kThree, kMinus | kOne}));  // v = 1 -1: 2 + 1, -2 + 1
}

const NormRopeParams kGood{.x = contiguous_view<3>(nullptr, DType::kBFloat16, {2, 5, 8}),
                           .cos_freqs = contiguous_view<3>(nullptr, DType::kFloat32, {1, 5, 8}),
                           .sin_freqs = contiguous_view<2>(nullptr, DType::kBFloat16, {5, 8}),
                           .weights = contiguous_view<1>(nullptr, DType::kFloat16, {8}),
                           .eps = 1e-6,
                           .out = {}};

TEST(RmsNormRope, Refuses) {
  const auto refusal = [](auto change) {
    NormRopeParams params = kGood;
    change(params);
    return message_of([&] { rms_norm_rope_check(params); });
  };
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& p) { p.x.device.kind = Device::Kind::kOther; }),
            "rms_norm_rope: x must be on a CPU or a CUDA device, got another device");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.device = {Device::Kind::kCuda, 1}; }),
            "rms_norm_rope: cos_freqs must be on cpu like x, got cuda:1");
  EXPECT_EQ(refusal([](auto& p) { p.weights->device = {Device::Kind::kCuda, 0}; }),
            "rms_norm_rope: weights must be on cpu like x, got cuda:0");
  EXPECT_EQ(refusal([](auto& p) { p.x.dtype = DType::kInt32; }),
            "rms_norm_rope: x must be bfloat16, float16 or float32, got int32");
  EXPECT_EQ(refusal([](auto& p) { p.sin_freqs.dtype = DType::kFp8; }),
            "rms_norm_rope: sin_freqs must be bfloat16, float16 or float32, got float8_e4m3fn");
  EXPECT_EQ(refusal([](auto& p) { p.weights->dtype = DType::kBool; }),
            "rms_norm_rope: weights must be bfloat16, float16 or float32, got bool");
  EXPECT_EQ(refusal([](auto& p) { p.x.rank = 0; }), "rms_norm_rope: x must have 1 to 8 dimensions, got []");
  EXPECT_EQ(refusal([](auto& p) { p.x.rank = 9; }), "rms_norm_rope: x must have 1 to 8 dimensions, got 9 dimensions");
  EXPECT_EQ(refusal([](auto& p) { p.x.sizes[2] = 7; }),
            "rms_norm_rope: x must have a last size that is even and > 0, got [2, 5, 7]");
  EXPECT_EQ(refusal([](auto& p) { p.x.sizes[2] = 0; }),
            "rms_norm_rope: x must have a last size that is even and > 0, got [2, 5, 0]");
  EXPECT_EQ(refusal([](auto& p) { p.weights->sizes[0] = 4; }), "rms_norm_rope: weights must have shape [8], got [4]");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.sizes[2] = 6; }),
            "rms_norm_rope: cos_freqs must have a last size of 8 or 4, got [1, 5, 6]");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.sizes[0] = 3; }),
            "rms_norm_rope: cos_freqs must broadcast to [2, 5, 8], got [3, 5, 8]");
  EXPECT_EQ(refusal([](auto& p) { p.sin_freqs.sizes[1] = 4; }),
            "rms_norm_rope: sin_freqs must have the last size of cos_freqs, 8, got [5, 4]");
  EXPECT_EQ(refusal([](auto& p) { p.x.strides[2] = 2; }),
            "rms_norm_rope: x must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& p) { p.sin_freqs.strides[1] = 3; }),
            "rms_norm_rope: sin_freqs must have a contiguous last dimension, got stride 3");
  EXPECT_EQ(refusal([](auto& p) { p.weights->strides[0] = 2; }),
            "rms_norm_rope: weights must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& p) { p.eps = 0; }), "rms_norm_rope: eps must be finite and > 0, got 0");
}

TEST(RmsNormRopeQk, Refuses) {
  const auto refusal = [](auto change) {
    NormRopeQkParams params{.q = kGood, .k = kGood};
    change(params);
    return message_of([&] { rms_norm_rope_qk_check(params); });
  };
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& p) { p.q.weights->sizes[0] = 4; }),
            "rms_norm_rope_qk: q_weights must have shape [8], got [4]");
  EXPECT_EQ(refusal([](auto& p) { p.k.x.device = {Device::Kind::kCuda, 0}; }),
            "rms_norm_rope_qk: k must be on cpu like q, got cuda:0");
  EXPECT_EQ(refusal([](auto& p) { p.k.x.sizes[1] = 6; }),
            "rms_norm_rope_qk: k_cos_freqs must broadcast to [2, 6, 8], got [1, 5, 8]");
  EXPECT_EQ(refusal([](auto& p) {
              p.k.x.sizes[2] = p.k.cos_freqs.sizes[2] = p.k.sin_freqs.sizes[1] = p.k.weights->sizes[0] = 4;
            }),
            "rms_norm_rope_qk: k must have the last size of q, 8, got [2, 5, 4]");
}

}  // namespace
}  // namespace ltx
