#include "ops/rms_norm_split_rope/rms_norm_split_rope.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "common/message_of.h"

namespace ltx {
namespace {

constexpr double kNoEps = 1e-30;

// bf16 bits of the numbers below
constexpr uint16_t kOne = 0x3F80;
constexpr uint16_t kTwo = 0x4000;
constexpr uint16_t kThree = 0x4040;
constexpr uint16_t kFour = 0x4080;
constexpr uint16_t kNan = 0x7FC0;
constexpr uint16_t kMinus = 0x8000;

TEST(RmsNormSplitRope, HalvesOfEachHeadByTheirOwnAngles) {
  std::array<float, 8> x{2, -2, 2, 2, 2, 2, -2, 2};  // two heads of 4, rms 2
  std::array<float, 8> weights{1, 1, 1, 3, 1, 1, 1, 1};
  std::array<float, 4> cos{2, 1, 3, 0};  // head 0: 2 1, head 1: 3 0
  std::array<float, 4> sin{1, 1, 1, 2};
  std::array<uint16_t, 8> out{};
  rms_norm_split_rope_cpu({.x = contiguous_view<3>(x.data(), DType::kFloat32, {1, 1, 8}),
                           .cos_freqs = contiguous_view<4>(cos.data(), DType::kFloat32, {1, 2, 1, 2}),
                           .sin_freqs = contiguous_view<4>(sin.data(), DType::kFloat32, {1, 2, 1, 2}),
                           .weights = contiguous_view<1>(weights.data(), DType::kFloat32, {8}),
                           .eps = kNoEps,
                           .out = contiguous_view<3>(out.data(), DType::kBFloat16, {1, 1, 8})});
  // head 0, v1 = 1 -1, v2 = 1 3:  1*2 - 1*1, -1*1 - 3*1;  1*2 + 1*1, 3*1 - 1*1
  // head 1, v1 = 1 1, v2 = -1 1:  1*3 + 1*1, 1*0 - 1*2;  -1*3 + 1*1, 1*0 + 1*2
  EXPECT_EQ(out, (std::array<uint16_t, 8>{kOne, kMinus | kFour, kThree, kTwo,  //
                                          kFour, kMinus | kTwo, kMinus | kTwo, kTwo}));
}

TEST(RmsNormSplitRope, SwappedTablesOfOneBatchAndStridedTokens) {
  // Two batches of two tokens; a token is one head of 2 and lies 4 elements from the next.
  std::array<float, 16> x{1, 1, 99, 99, 2, 2, 99, 99, 1, -1, 99, 99, -2, 2, 99, 99};
  TensorView x_view = contiguous_view<3>(x.data(), DType::kFloat32, {2, 2, 2});
  x_view.strides = {8, 4, 1};
  std::array<float, 4> cos{1, 99, 2, 99};  // [1, tokens, heads of 2, 1], axes 1 and 2 swapped; head 0 alone
  std::array<float, 4> sin{0, 99, 1, 99};
  TensorView cos_view = contiguous_view<4>(cos.data(), DType::kFloat32, {1, 1, 2, 1});
  cos_view.strides = {4, 1, 2, 1};
  TensorView sin_view = cos_view;
  sin_view.data = sin.data();
  std::array<uint16_t, 8> out{};
  rms_norm_split_rope_cpu({.x = x_view,
                           .cos_freqs = cos_view,
                           .sin_freqs = sin_view,
                           .weights = {},
                           .eps = kNoEps,
                           .out = contiguous_view<3>(out.data(), DType::kBFloat16, {2, 2, 2})});
  // 1 1 as it is; 1 1: 2 - 1, 2 + 1; 1 -1 as it is; -1 1: -2 - 1, 2 - 1
  EXPECT_EQ(out, (std::array<uint16_t, 8>{kOne, kOne, kOne, kThree, kOne, kMinus | kOne, kMinus | kThree, kOne}));
}

TEST(RmsNormSplitRope, ZeroRowsGiveZerosAndOverflowingOnesNan) {
  std::array<float, 4> x{0, 0, 2e19f, 2e19f};
  std::array<float, 2> ones{1, 1};
  std::array<uint16_t, 4> out{};
  const TensorView table = contiguous_view<4>(ones.data(), DType::kFloat32, {1, 1, 2, 1});
  rms_norm_split_rope_cpu({.x = contiguous_view<3>(x.data(), DType::kFloat32, {1, 2, 2}),
                           .cos_freqs = table,
                           .sin_freqs = table,
                           .weights = {},
                           .eps = 1e-6,
                           .out = contiguous_view<3>(out.data(), DType::kBFloat16, {1, 2, 2})});
  EXPECT_EQ(out, (std::array<uint16_t, 4>{0, 0, kNan, kNan}));
}

TEST(RmsNormSplitRope, NoTokens) {
  const TensorView table = contiguous_view<4>(nullptr, DType::kFloat32, {1, 2, 0, 2});
  rms_norm_split_rope_cpu({.x = contiguous_view<3>(nullptr, DType::kFloat32, {3, 0, 8}),
                           .cos_freqs = table,
                           .sin_freqs = table,
                           .weights = {},
                           .eps = 1e-6,
                           .out = contiguous_view<3>(nullptr, DType::kBFloat16, {3, 0, 8})});
}

TEST(RmsNormSplitRopeQk, HeadCountsMayDiffer) {
  std::array<float, 4> x{2, 2, 2, -2};
  std::array<float, 2> cos{1, 1};
  std::array<float, 2> sin{1, 1};
  std::array<uint16_t, 4> q_out{};
  std::array<uint16_t, 4> k_out{};
  const auto params = [&](const std::array<int64_t, 4>& table, std::array<uint16_t, 4>& out) {
    return NormRopeParams{.x = contiguous_view<3>(x.data(), DType::kFloat32, {1, 1, 4}),
                          .cos_freqs = contiguous_view<4>(cos.data(), DType::kFloat32, table),
                          .sin_freqs = contiguous_view<4>(sin.data(), DType::kFloat32, table),
                          .weights = {},
                          .eps = kNoEps,
                          .out = contiguous_view<3>(out.data(), DType::kBFloat16, {1, 1, 4})};
  };
  rms_norm_split_rope_qk_cpu({.q = params({1, 1, 1, 2}, q_out), .k = params({1, 2, 1, 1}, k_out)});
  // q, a head of 4: 1 - 1, 1 + 1, 1 + 1, -1 + 1;  k, two of 2: 1 - 1, 1 + 1, 1 + 1, -1 + 1
  EXPECT_EQ(q_out, (std::array<uint16_t, 4>{0, kTwo, kTwo, 0}));
  EXPECT_EQ(k_out, (std::array<uint16_t, 4>{0, kTwo, kTwo, 0}));
}

const NormRopeParams kGood{.x = contiguous_view<3>(nullptr, DType::kBFloat16, {2, 5, 8}),
                           .cos_freqs = contiguous_view<4>(nullptr, DType::kFloat32, {1, 2, 5, 2}),
                           .sin_freqs = contiguous_view<4>(nullptr, DType::kBFloat16, {2, 2, 5, 2}),
                           .weights = contiguous_view<1>(nullptr, DType::kFloat16, {8}),
                           .eps = 1e-6,
                           .out = {}};

TEST(RmsNormSplitRope, Refuses) {
  const auto refusal = [](auto change) {
    NormRopeParams params = kGood;
    change(params);
    return message_of([&] { rms_norm_split_rope_check(params); });
  };
  const std::string shape = " must have shape [2 or 1, heads, 5, head_dim / 2] with heads * head_dim = 8, got ";
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& p) { p.x.device.kind = Device::Kind::kOther; }),
            "rms_norm_split_rope: x must be on a CPU or a CUDA device, got another device");
  EXPECT_EQ(refusal([](auto& p) { p.sin_freqs.device = {Device::Kind::kCuda, 1}; }),
            "rms_norm_split_rope: sin_freqs must be on cpu like x, got cuda:1");
  EXPECT_EQ(refusal([](auto& p) { p.x.dtype = DType::kFloat64; }),
            "rms_norm_split_rope: x must be bfloat16, float16 or float32, got float64");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.dtype = DType::kUint8; }),
            "rms_norm_split_rope: cos_freqs must be bfloat16, float16 or float32, got uint8");
  EXPECT_EQ(refusal([](auto& p) { p.x.rank = 2; }), "rms_norm_split_rope: x must have 3 dimensions, got [2, 5]");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.rank = 3; }),
            "rms_norm_split_rope: cos_freqs must have 4 dimensions, got [1, 2, 5]");
  EXPECT_EQ(refusal([](auto& p) { p.x.sizes[2] = 7; }),
            "rms_norm_split_rope: x must have a last size that is even and > 0, got [2, 5, 7]");
  EXPECT_EQ(refusal([](auto& p) { p.weights->sizes[0] = 4; }),
            "rms_norm_split_rope: weights must have shape [8], got [4]");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.sizes[0] = 3; }),
            "rms_norm_split_rope: cos_freqs" + shape + "[3, 2, 5, 2]");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.sizes[2] = 4; }),
            "rms_norm_split_rope: cos_freqs" + shape + "[1, 2, 4, 2]");
  EXPECT_EQ(refusal([](auto& p) { p.sin_freqs.sizes[1] = 4; }),
            "rms_norm_split_rope: sin_freqs" + shape + "[2, 4, 5, 2]");
  EXPECT_EQ(refusal([](auto& p) { p.sin_freqs.sizes = {2, 4, 5, 1}; }),
            "rms_norm_split_rope: sin_freqs must have the heads of cos_freqs, 2, got [2, 4, 5, 1]");
  EXPECT_EQ(refusal([](auto& p) { p.x.strides[2] = 2; }),
            "rms_norm_split_rope: x must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& p) { p.cos_freqs.strides[3] = 5; }),
            "rms_norm_split_rope: cos_freqs must have a contiguous last dimension, got stride 5");
  EXPECT_EQ(refusal([](auto& p) { p.eps = std::numeric_limits<double>::infinity(); }),
            "rms_norm_split_rope: eps must be finite and > 0, got inf");
}

TEST(RmsNormSplitRopeQk, Refuses) {
  const auto refusal = [](auto change) {
    NormRopeQkParams params{.q = kGood, .k = kGood};
    change(params);
    return message_of([&] { rms_norm_split_rope_qk_check(params); });
  };
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& p) { p.q.weights->sizes[0] = 4; }),
            "rms_norm_split_rope_qk: q_weights must have shape [8], got [4]");
  EXPECT_EQ(refusal([](auto& p) { p.k.weights->sizes[0] = 4; }),
            "rms_norm_split_rope_qk: k_weights must have shape [8], got [4]");
  EXPECT_EQ(refusal([](auto& p) { p.k.x.device = {Device::Kind::kCuda, 0}; }),
            "rms_norm_split_rope_qk: k must be on cpu like q, got cuda:0");
  EXPECT_EQ(refusal([](auto& p) {
              p.k.x.sizes[2] = p.k.weights->sizes[0] = 4;
              p.k.cos_freqs.sizes[1] = p.k.sin_freqs.sizes[1] = 1;
            }),
            "rms_norm_split_rope_qk: k must have the last size of q, 8, got [2, 5, 4]");
}

}  // namespace
}  // namespace ltx
