#include "blockwise/fp8_gemm/fp8_gemm.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "blockwise/fp8_gemm/fp8_gemm_block.h"

namespace ltx {
namespace {

constexpr uint8_t kOne = 0x38;  // 1.0 in e4m3
constexpr int64_t kN = 8;

// A product of small matrices with its memory: all values 1 unless a test changes them.
struct Product {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t blocks = (k + 127) / 128;
  std::vector<uint8_t> a = std::vector<uint8_t>(m * k, kOne);
  std::vector<float> a_scales = std::vector<float>(m * blocks, 1.0f);
  std::vector<uint8_t> b = std::vector<uint8_t>(n * k, kOne);
  std::vector<float> b_scales = std::vector<float>((n + 127) / 128 * blocks, 1.0f);
  std::vector<float> bias = {};
  std::vector<float> residual = {};

  Fp8GemmParams params() {
    Fp8GemmParams params{
        .a = contiguous_view<2>(a.data(), DType::kFp8, {m, k}),
        .a_scales = contiguous_view<2>(a_scales.data(), DType::kFloat32, {m, blocks}),
        .b = contiguous_view<2>(b.data(), DType::kFp8, {n, k}),
        .b_scales = contiguous_view<2>(b_scales.data(), DType::kFloat32, {(n + 127) / 128, blocks}),
        .bias = {},
        .residual = {},
        .out_dtype = DType::kFloat32,
        .out = {},
    };
    if (!bias.empty()) params.bias = contiguous_view<1>(bias.data(), DType::kFloat32, {n});
    if (!residual.empty()) params.residual = contiguous_view<2>(residual.data(), DType::kFloat32, {m, n});
    return params;
  }
};

template <class T>
std::vector<T> run(Fp8GemmParams params, DType out_dtype = DType::kFloat32,
                   const Fp8GemmBlockKernel& kernel = fp8_gemm_block_kernels().front()) {
  const int64_t m = params.a.size(0);
  const int64_t n = params.b.size(0);
  std::vector<T> out(m * n);
  params.out_dtype = out_dtype;
  params.out = contiguous_view<2>(out.data(), out_dtype, {m, n});
  fp8_gemm_cpu_by(kernel, params);
  return out;
}

std::vector<float> run(Product& product) { return run<float>(product.params()); }

TEST(Fp8Gemm, ScalesEachBlockAndAddsBiasAndResidual) {
  Product product{.m = 2, .n = kN, .k = 144};
  product.a_scales = {0.5f, 2.0f, 1.0f, 4.0f};
  product.b_scales = {3.0f, 0.25f};
  product.bias = {0, 1, 2, 3, 4, 5, 6, 7};
  product.residual = std::vector<float>(2 * kN, 0.25f);
  product.residual[kN] = -0.5f;
  const std::vector<float> out = run(product);
  for (int column = 0; column < kN; ++column) {
    EXPECT_EQ(out[column], 128 * 1.5f + 16 * 0.5f + static_cast<float>(column) + 0.25f);
  }
  EXPECT_EQ(out[kN], 128 * 3.0f + 16 * 1.0f - 0.5f);
}

TEST(Fp8Gemm, EachElementOfOutIsItsOwnRowAndColumn) {
  Product product{.m = 2, .n = kN, .k = 16};
  product.a[3] = 0x40;           // a[0, 3] = 2
  product.a[16 + 5] = 0x30;      // a[1, 5] = 1/2
  product.b[6 * 16 + 3] = 0x48;  // b[6, 3] = 4
  product.b[7 * 16 + 5] = 0xB8;  // b[7, 5] = -1
  product.b[7 * 16 + 6] = 0x01;  // b[7, 6] = 2^-9
  const std::vector<float> out = run(product);
  EXPECT_EQ(out[0], 17.0f);
  EXPECT_EQ(out[6], 15.0f + 8.0f);
  EXPECT_EQ(out[7], 17.0f - 2.0f - 1.0f + 0x1p-9f);
  EXPECT_EQ(out[kN], 15.5f);
  EXPECT_EQ(out[kN + 6], 14.5f + 4.0f);
  EXPECT_EQ(out[kN + 7], 14.0f - 0.5f + 0x1p-9f);
}

TEST(Fp8Gemm, EveryScaleBelongsToItsBlock) {
  Product product{.m = 1, .n = 136, .k = 272};
  product.a_scales = {1.0f, 0x1p-10f, 0x1p-20f};
  product.b_scales = {1.0f, 2.0f, 4.0f, 3.0f, 5.0f, 7.0f};
  const std::vector<float> out = run(product);
  EXPECT_EQ(out[0], 128 + 256 * 0x1p-10f + 64 * 0x1p-20f);
  EXPECT_EQ(out[127], out[0]);
  EXPECT_EQ(out[128], 384 + 640 * 0x1p-10f + 112 * 0x1p-20f);
}

TEST(Fp8Gemm, MultipliesByScalesThenAdds) {
  // 3 * (1 + 2^-23) is rounded to 3 + 2^-21 before -3 joins; a fused multiply-add would leave 3 * 2^-23.
  Product product{.m = 1, .n = kN, .k = 144};
  std::fill(product.a.begin(), product.a.end(), 0);
  for (const int i : {0, 1, 2, 128, 129, 130}) product.a[i] = kOne;
  product.a_scales = {-1.0f, 1.0f + 0x1p-23f};
  EXPECT_EQ(run(product), std::vector<float>(kN, 0x1p-21f));
}

TEST(Fp8Gemm, MultipliesTheScalesFirst) {
  Product product{.m = 1, .n = kN, .k = 16};
  product.a_scales = {0x1p-100f};
  product.b_scales = {0x1p-100f};  // 16 * 2^-200 rounded: 2^-200 is 0 in fp32
  EXPECT_EQ(run(product), std::vector<float>(kN, 0.0f));
  product.a_scales = {0x1p100f};
  EXPECT_EQ(run(product), std::vector<float>(kN, 16.0f));
}

TEST(Fp8Gemm, AddsBiasBeforeResidual) {
  Product product{.m = 1, .n = kN, .k = 16};
  product.bias = std::vector<float>(kN, 0x1p28f);  // 2^28 + 16 is a tie: the even one is 2^28
  product.residual = std::vector<float>(kN, -0x1p28f);
  EXPECT_EQ(run(product), std::vector<float>(kN, 0.0f));
}

TEST(Fp8Gemm, RoundsOnce) {
  Product product{.m = 1, .n = kN, .k = 256};
  product.bias = std::vector<float>(kN, 0.75f);
  std::vector<uint16_t> half(kN);
  Fp8GemmParams params = product.params();
  // 256 + 0.75 + 0.5 is nearer to bf16's 258 than to its 256; 256.75 is not.
  half.assign(kN, 0x3F00);
  params.residual = contiguous_view<2>(half.data(), DType::kBFloat16, {1, kN});
  EXPECT_EQ(run<uint16_t>(params, DType::kBFloat16), std::vector<uint16_t>(kN, 0x4381));
  // In fp16 257.25 is exact.
  half.assign(kN, 0x3800);
  params.residual = contiguous_view<2>(half.data(), DType::kFloat16, {1, kN});
  EXPECT_EQ(run<uint16_t>(params, DType::kFloat16), std::vector<uint16_t>(kN, 0x5C05));
}

TEST(Fp8Gemm, UnpacksFp6) {
  // 2^-6, 2^-6, -2^-9, 0: codes 001000 001000 100001 000000
  Product product{.m = 1, .n = kN, .k = 144};
  std::vector<uint8_t> packed;
  for (int group = 0; group < kN * 144 / 4; ++group) packed.insert(packed.end(), {0x20, 0x88, 0x40});
  Fp8GemmParams params = product.params();
  params.b = contiguous_view<2>(packed.data(), DType::kUint8, {kN, 108});
  EXPECT_EQ(run<float>(params), std::vector<float>(kN, 36 * (0x1p-5f - 0x1p-9f)));
}

TEST(Fp8Gemm, FollowsStrides) {
  Product product{.m = 2, .n = kN, .k = 16};
  std::vector<uint8_t> wide(2 * 48, 0x7F);
  std::fill_n(wide.begin(), 16, kOne);
  std::fill_n(wide.begin() + 48, 16, 0x40);
  std::vector<uint16_t> scales = {0x3F80, 0xFFFF, 0xFFFF, 0x4000};  // bf16 1 and 2
  std::vector<float> bias(3 * kN, std::numeric_limits<float>::quiet_NaN());
  for (int i = 0; i < kN; ++i) bias[3 * i] = static_cast<float>(i);
  Fp8GemmParams params = product.params();
  params.a = contiguous_view<2>(wide.data(), DType::kFp8, {2, 16});
  params.a.strides[0] = 48;
  params.a_scales = contiguous_view<2>(scales.data(), DType::kBFloat16, {2, 1});
  params.a_scales.strides[0] = 3;
  params.bias = contiguous_view<1>(bias.data(), DType::kFloat32, {kN});
  params.bias->strides[0] = 3;
  const std::vector<float> out = run<float>(params);
  EXPECT_EQ(out[1], 17.0f);
  EXPECT_EQ(out[kN + 7], 64.0f + 7.0f);
}

TEST(Fp8Gemm, NanStaysInItsRowColumnAndBlock) {
  Product product{.m = 3, .n = 136, .k = 144};
  product.a[1 * 144 + 130] = 0xFF;                                         // row 1
  product.b[2 * 144 + 5] = 0x7F;                                           // column 2
  product.b_scales[1 * 2 + 1] = -std::numeric_limits<float>::quiet_NaN();  // columns from 128 on
  const std::vector<float> out = run(product);
  for (int row = 0; row < 3; ++row) {
    for (int column = 0; column < 136; ++column) {
      const bool poisoned = row == 1 || column == 2 || column >= 128;
      EXPECT_EQ(std::bit_cast<uint32_t>(out[row * 136 + column]), poisoned ? 0x7FC00000 : 0x43100000);  // NaN or 144
    }
  }
}

TEST(Fp8Gemm, NoRows) {
  Product product{.m = 0, .n = kN, .k = 16};
  EXPECT_TRUE(run(product).empty());
}

TEST(Fp8GemmBlock, AllKernelsGiveTheSameBits) {
  std::mt19937 random;
  const Fp8GemmBlockKernel& plain = fp8_gemm_block_kernels().back();
  ASSERT_STREQ(plain.name, "plain");
  for (const auto& [m, n, k] :
       {std::array<int64_t, 3>{1, 8, 16}, {7, 40, 144}, {65, 128, 400}, {129, 136, 128}, {12, 264, 1040}}) {
    Product product{.m = m, .n = n, .k = k};
    for (uint8_t& code : product.a) code = static_cast<uint8_t>(random());
    for (uint8_t& code : product.b) code = static_cast<uint8_t>(random());
    for (float& scale : product.a_scales) scale = std::ldexp(static_cast<float>(random()), -40);
    for (float& scale : product.b_scales) scale = std::ldexp(static_cast<float>(random()), -40);
    // Among random bytes some are NaN, which would leave few finite results: all but one become numbers.
    for (std::vector<uint8_t>* codes : {&product.a, &product.b}) {
      for (uint8_t& code : *codes) code = (code & 0x7F) == 0x7F ? code - 1 : code;
    }
    product.a[0] = 0xFF;
    Fp8GemmParams fp8 = product.params();
    Fp8GemmParams fp6 = fp8;
    fp6.b = contiguous_view<2>(product.b.data(), DType::kUint8, {n, k / 4 * 3});
    for (const Fp8GemmParams& params : {fp8, fp6}) {
      const std::vector<float> expected = run<float>(params, DType::kFloat32, plain);
      for (const Fp8GemmBlockKernel& kernel : fp8_gemm_block_kernels()) {
        const std::vector<float> out = run<float>(params, DType::kFloat32, kernel);
        EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0)
            << kernel.name << " " << m << " x " << n << " x " << k;
      }
    }
  }
}

std::string refusal(const Fp8GemmParams& params) {
  try {
    fp8_gemm_check(params);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Fp8Gemm, RefusesDevicesAndDTypes) {
  Product product{.m = 3, .n = kN, .k = 144, .bias = std::vector<float>(kN), .residual = std::vector<float>(3 * kN)};
  const Fp8GemmParams good = product.params();
  EXPECT_EQ(refusal(good), "no error");
  const Device cuda{Device::Kind::kCuda, 0};

  Fp8GemmParams params = good;
  params.a.device.kind = Device::Kind::kOther;
  EXPECT_EQ(refusal(params), "fp8_gemm: a must be on a CPU or a CUDA device, got another device");
  params = good;
  params.a_scales.device = cuda;
  EXPECT_EQ(refusal(params), "fp8_gemm: a_scales must be on cpu like a, got cuda:0");
  params = good;
  params.b.device = cuda;
  EXPECT_EQ(refusal(params), "fp8_gemm: b must be on cpu like a, got cuda:0");
  params = good;
  params.b_scales.device = cuda;
  EXPECT_EQ(refusal(params), "fp8_gemm: b_scales must be on cpu like a, got cuda:0");
  params = good;
  params.bias->device = cuda;
  EXPECT_EQ(refusal(params), "fp8_gemm: bias must be on cpu like a, got cuda:0");
  params = good;
  params.residual->device = cuda;
  EXPECT_EQ(refusal(params), "fp8_gemm: residual must be on cpu like a, got cuda:0");

  params = good;
  params.a.dtype = DType::kFp8E5m2;
  EXPECT_EQ(refusal(params), "fp8_gemm: a must be float8_e4m3fn, got float8_e5m2");
  params = good;
  params.a_scales.dtype = DType::kFloat64;
  EXPECT_EQ(refusal(params), "fp8_gemm: a_scales must be bfloat16, float16 or float32, got float64");
  params = good;
  params.b.dtype = DType::kInt8;
  EXPECT_EQ(refusal(params), "fp8_gemm: b must be float8_e4m3fn or uint8, got int8");
  params = good;
  params.b_scales.dtype = DType::kUint8;
  EXPECT_EQ(refusal(params), "fp8_gemm: b_scales must be bfloat16, float16 or float32, got uint8");
  params = good;
  params.bias->dtype = DType::kBFloat16;
  EXPECT_EQ(refusal(params), "fp8_gemm: bias must be float32, got bfloat16");
  params = good;
  params.out_dtype = DType::kFloat64;
  EXPECT_EQ(refusal(params), "fp8_gemm: out_dtype must be bfloat16, float16 or float32, got float64");
  params = good;
  params.out_dtype = DType::kBFloat16;
  EXPECT_EQ(refusal(params), "fp8_gemm: residual must be bfloat16, got float32");
}

TEST(Fp8Gemm, RefusesShapesAndStrides) {
  Product product{.m = 3, .n = kN, .k = 144, .bias = std::vector<float>(kN), .residual = std::vector<float>(3 * kN)};
  const Fp8GemmParams good = product.params();
  const auto resized = [](std::optional<TensorView> view, std::initializer_list<int64_t> sizes) {
    view->rank = static_cast<int>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), view->sizes.begin());
    return *view;
  };

  Fp8GemmParams params = good;
  params.a = resized(good.a, {144});
  EXPECT_EQ(refusal(params), "fp8_gemm: a must have 2 dimensions, got [144]");
  params = good;
  params.b = resized(good.b, {1, 8, 144});
  EXPECT_EQ(refusal(params), "fp8_gemm: b must have 2 dimensions, got [1, 8, 144]");
  params = good;
  params.a = resized(good.a, {3, 136});
  EXPECT_EQ(refusal(params), "fp8_gemm: a must have a last size that is a positive multiple of 16, got [3, 136]");
  params.a = resized(good.a, {3, 0});
  EXPECT_EQ(refusal(params), "fp8_gemm: a must have a last size that is a positive multiple of 16, got [3, 0]");
  params = good;
  params.b = resized(good.b, {12, 144});
  EXPECT_EQ(refusal(params), "fp8_gemm: b must have a first size that is a positive multiple of 8, got [12, 144]");
  params = good;
  params.b = resized(good.b, {8, 128});
  EXPECT_EQ(refusal(params), "fp8_gemm: b must have a last size of 144 like a, got [8, 128]");
  params.b.dtype = DType::kUint8;
  EXPECT_EQ(refusal(params),
            "fp8_gemm: b must have a last size of 108, 3/4 of a's 144 (uint8 is packed fp6), got [8, 128]");
  params = good;
  params.a_scales = resized(good.a_scales, {2, 3});
  EXPECT_EQ(refusal(params), "fp8_gemm: a_scales must have shape [3, 2], got [2, 3]");
  params = good;
  params.b_scales = resized(good.b_scales, {1, 1});
  EXPECT_EQ(refusal(params), "fp8_gemm: b_scales must have shape [1, 2], got [1, 1]");
  params = good;
  params.bias = resized(good.bias, {1, 8});
  EXPECT_EQ(refusal(params), "fp8_gemm: bias must have shape [8], got [1, 8]");
  params = good;
  params.residual = resized(good.residual, {1, 8});
  EXPECT_EQ(refusal(params), "fp8_gemm: residual must have shape [3, 8], got [1, 8]");

  params = good;
  params.a.strides = {1, 3};
  EXPECT_EQ(refusal(params), "fp8_gemm: a must have a contiguous last dimension, got stride 3");
  params = good;
  params.b.strides = {1, 8};
  EXPECT_EQ(refusal(params), "fp8_gemm: b must have a contiguous last dimension, got stride 8");
  params = good;
  params.residual->strides = {1, 3};
  EXPECT_EQ(refusal(params), "fp8_gemm: residual must have a contiguous last dimension, got stride 3");
}

}  // namespace
}  // namespace ltx
