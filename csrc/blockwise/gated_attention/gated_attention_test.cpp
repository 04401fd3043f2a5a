#include "blockwise/gated_attention/gated_attention.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <limits>
#include <vector>

#include "common/message_of.h"

namespace ltx {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(GatedAttention, EachHeadHasItsGate) {
  std::array<float, 6> x{1, 2, 3, 4, 5, 6};
  std::array<float, 3> logits{0, kInfinity, -1.0986123f};  // gates 1, 2, 2 / (1 + 3)
  std::array<uint16_t, 6> out{};
  gated_attention_cpu({.x = contiguous_view<2>(x.data(), DType::kFloat32, {1, 6}),
                       .gate_logits = contiguous_view<2>(logits.data(), DType::kFloat32, {1, 3}),
                       .out = contiguous_view<2>(out.data(), DType::kBFloat16, {1, 6}),
                       .scales = {}});
  EXPECT_EQ(out, (std::array<uint16_t, 6>{0x3F80, 0x4000, 0x40C0, 0x4100, 0x4020, 0x4040}));  // 1 2 6 8 2.5 3
}

TEST(GatedAttention, BlocksRunAcrossHeads) {
  constexpr int64_t kHidden = 192;  // two heads of 96: the first block ends inside the second head
  std::vector<float> x(kHidden, 1.0f);
  std::array<float, 2> logits{-kInfinity, 0.0f};
  std::vector<uint8_t> out(kHidden, 0xEE);
  std::vector<float> padded_scales(8, -1.0f);
  TensorView scales = contiguous_view<2>(padded_scales.data(), DType::kFloat32, {1, 2});
  scales.strides = {1, 4};
  const GatedAttentionParams params{.x = contiguous_view<1>(x.data(), DType::kFloat32, {kHidden}),
                                    .gate_logits = contiguous_view<1>(logits.data(), DType::kFloat32, {2}),
                                    .out = contiguous_view<1>(out.data(), DType::kFp8, {kHidden}),
                                    .scales = scales};
  gated_attention_cpu(params);
  EXPECT_EQ(out[95], 0x00);
  EXPECT_EQ(out[96], 0x7E);
  EXPECT_EQ(out[191], 0x7E);
  EXPECT_EQ(padded_scales, (std::vector<float>{1.0f / 448.0f, 0, 0, 0, 1.0f / 448.0f, 0, 0, 0}));

  x[0] = kInfinity;  // times a gate of 0
  gated_attention_cpu(params);
  EXPECT_EQ(std::bit_cast<uint32_t>(padded_scales[0]), 0x7FC00000u);
  EXPECT_EQ(padded_scales[4], 1.0f / 448.0f);
  EXPECT_EQ(out[96], 0x00);
  EXPECT_EQ(out[128], 0x7E);
}

TEST(GatedAttention, Refuses) {
  const GatedAttentionParams good{.x = contiguous_view<3>(nullptr, DType::kBFloat16, {2, 5, 8}),
                                  .gate_logits = contiguous_view<3>(nullptr, DType::kFloat32, {2, 5, 4}),
                                  .out = {},
                                  .scales = {}};
  const auto refusal = [&](auto change) {
    GatedAttentionParams params = good;
    change(params);
    return message_of([&] { gated_attention_check(params); });
  };
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& params) { params.x.device.kind = Device::Kind::kOther; }),
            "gated_attention: x must be on a CPU or a CUDA device, got another device");
  EXPECT_EQ(refusal([](auto& params) { params.gate_logits.device = {Device::Kind::kCuda, 0}; }),
            "gated_attention: gate_logits must be on cpu like x, got cuda:0");
  EXPECT_EQ(refusal([](auto& params) { params.x.dtype = DType::kFp8; }),
            "gated_attention: x must be bfloat16, float16 or float32, got float8_e4m3fn");
  EXPECT_EQ(refusal([](auto& params) { params.gate_logits.dtype = DType::kBool; }),
            "gated_attention: gate_logits must be bfloat16, float16 or float32, got bool");
  EXPECT_EQ(refusal([](auto& params) { params.x.rank = 0; }), "gated_attention: x must have 1 to 8 dimensions, got []");
  EXPECT_EQ(refusal([](auto& params) { params.gate_logits.sizes[1] = 1; }),
            "gated_attention: gate_logits must have the leading sizes of x [2, 5, 8], got [2, 1, 4]");
  EXPECT_EQ(refusal([](auto& params) { params.gate_logits.rank = 2; }),
            "gated_attention: gate_logits must have the leading sizes of x [2, 5, 8], got [2, 5]");
  EXPECT_EQ(refusal([](auto& params) { params.gate_logits.sizes[2] = 3; }),
            "gated_attention: gate_logits must have a last size that divides x's, 8, got 3");
  EXPECT_EQ(refusal([](auto& params) { params.gate_logits.sizes[2] = 0; }),
            "gated_attention: gate_logits must have a last size that divides x's, 8, got 0");
  EXPECT_EQ(refusal([](auto& params) { params.x.strides[2] = 2; }),
            "gated_attention: x must have a contiguous last dimension, got stride 2");
  EXPECT_EQ(refusal([](auto& params) { params.gate_logits.strides[2] = 2; }),
            "gated_attention: gate_logits must have a contiguous last dimension, got stride 2");
}

}  // namespace
}  // namespace ltx
