#include "ops/fp6/fp6.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "common/fp6.h"
#include "common/message_of.h"
#include "ops/fp6/fp6_words.h"

namespace ltx {
namespace {

TEST(Fp6Pack, PacksFourValuesIntoThreeBytes) {
  // 2^-9; -2^-8; -0; NaN, which saturates. Codes 000001 100010 100000 011111.
  std::array<uint8_t, 4> x{0x01, 0x82, 0x80, 0x7F};
  std::array<uint8_t, 3> out{};
  fp6_pack_cpu({.x = contiguous_view<2>(x.data(), DType::kUint8, {1, 4}),
                .out = contiguous_view<2>(out.data(), DType::kUint8, {1, 3})});
  EXPECT_EQ(out, (std::array<uint8_t, 3>{0b00000110, 0b00101000, 0b00011111}));
}

TEST(Fp6Pack, FollowsTheRowStride) {
  std::array<uint8_t, 12> x{1, 1, 1, 1, 0xEE, 0xEE, 2, 2, 2, 2, 0xEE, 0xEE};
  TensorView view = contiguous_view<2>(x.data(), DType::kFp8, {2, 4});
  view.strides[0] = 6;
  std::array<uint8_t, 6> out{};
  fp6_pack_cpu({.x = view, .out = contiguous_view<2>(out.data(), DType::kUint8, {2, 3})});
  EXPECT_EQ(out, (std::array<uint8_t, 6>{0x04, 0x10, 0x41, 0x08, 0x20, 0x82}));
}

TEST(Fp6Unpack, UnpacksThreeBytesIntoFourValues) {
  std::array<uint8_t, 3> x{0b00000110, 0b00101000, 0b00011111};
  std::array<uint8_t, 4> out{};
  fp6_unpack_cpu({.x = contiguous_view<2>(x.data(), DType::kUint8, {1, 3}),
                  .original_n = 4,
                  .out = contiguous_view<2>(out.data(), DType::kUint8, {1, 4})});
  EXPECT_EQ(out, (std::array<uint8_t, 4>{0x01, 0x82, 0x80, 0x1F}));
}

TEST(Fp6, EmptyMatrices) {
  for (const auto& [m, n] : {std::array<int64_t, 2>{0, 8}, {3, 0}, {0, 0}}) {
    const TensorView e4m3 = contiguous_view<2>(nullptr, DType::kUint8, {m, n});
    const TensorView packed = contiguous_view<2>(nullptr, DType::kUint8, {m, n / 4 * 3});
    fp6_pack_cpu({.x = e4m3, .out = packed});
    fp6_unpack_cpu({.x = packed, .original_n = n, .out = e4m3});
  }
}

TEST(Fp6Pack, Refuses) {
  const auto refusal = [](TensorView x) { return message_of([&] { fp6_pack_check({.x = x, .out = {}}); }); };
  const TensorView good = contiguous_view<2>(nullptr, DType::kUint8, {2, 8});
  EXPECT_EQ(refusal(good), "no error");
  TensorView x = good;
  x.device.kind = Device::Kind::kOther;
  EXPECT_EQ(refusal(x), "fp6_pack: x must be on a CPU or a CUDA device, got another device");
  x = good;
  x.dtype = DType::kBFloat16;
  EXPECT_EQ(refusal(x), "fp6_pack: x must be uint8 or float8_e4m3fn, got bfloat16");
  EXPECT_EQ(refusal(contiguous_view<1>(nullptr, DType::kUint8, {8})), "fp6_pack: x must have 2 dimensions, got [8]");
  EXPECT_EQ(refusal(contiguous_view<2>(nullptr, DType::kUint8, {2, 6})),
            "fp6_pack: x must have a last size that is a multiple of 4, got [2, 6]");
  x = good;
  x.strides = {1, 2};
  EXPECT_EQ(refusal(x), "fp6_pack: x must have a contiguous last dimension, got stride 2");
}

TEST(Fp6Unpack, Refuses) {
  const auto refusal = [](TensorView x, int64_t original_n) {
    return message_of([&] { fp6_unpack_check({.x = x, .original_n = original_n, .out = {}}); });
  };
  const TensorView good = contiguous_view<2>(nullptr, DType::kUint8, {2, 6});
  EXPECT_EQ(refusal(good, 8), "no error");
  TensorView x = good;
  x.device.kind = Device::Kind::kOther;
  EXPECT_EQ(refusal(x, 8), "fp6_unpack: x must be on a CPU or a CUDA device, got another device");
  x = good;
  x.dtype = DType::kFp8;
  EXPECT_EQ(refusal(x, 8), "fp6_unpack: x must be uint8, got float8_e4m3fn");
  EXPECT_EQ(refusal(contiguous_view<1>(nullptr, DType::kUint8, {6}), 8),
            "fp6_unpack: x must have 2 dimensions, got [6]");
  EXPECT_EQ(refusal(contiguous_view<2>(nullptr, DType::kUint8, {2, 7}), 8),
            "fp6_unpack: x must have a last size that is a multiple of 3, got [2, 7]");
  EXPECT_EQ(refusal(good, 7), "fp6_unpack: original_n must be 8, 4/3 of x's last size, got 7");
  x = good;
  x.strides = {1, 2};
  EXPECT_EQ(refusal(x, 8), "fp6_unpack: x must have a contiguous last dimension, got stride 2");
}

// The kernels' arithmetic against the specification's. Every byte value at each of the 16 places, the others filled
// with ones or zeros, so that a bit that strays into a neighbour shows.
TEST(Fp6Words, EqualTheBytewiseFunctions) {
  for (const uint8_t fill : {0x00, 0x1F, 0x80, 0xFF}) {
    for (int place = 0; place < 16; ++place) {
      for (int value = 0; value < 256; ++value) {
        std::array<uint8_t, 16> e4m3;
        e4m3.fill(fill);
        e4m3[place] = static_cast<uint8_t>(value);
        std::array<uint8_t, 12> packed{};
        for (int group = 0; group < 4; ++group) pack_fp6(&e4m3[4 * group], &packed[3 * group]);
        std::array<uint8_t, 16> unpacked{};
        for (int group = 0; group < 4; ++group) unpack_fp6(&packed[3 * group], &unpacked[4 * group]);

        std::array<uint32_t, 4> e4m3_words;
        std::memcpy(e4m3_words.data(), e4m3.data(), 16);
        const std::array<uint32_t, 3> packed_words = pack_fp6_words(e4m3_words);
        ASSERT_EQ(std::memcmp(packed_words.data(), packed.data(), 12), 0) << place << " " << value;
        const std::array<uint32_t, 4> unpacked_words = unpack_fp6_words(packed_words);
        ASSERT_EQ(std::memcmp(unpacked_words.data(), unpacked.data(), 16), 0) << place << " " << value;
      }
    }
  }
}

}  // namespace
}  // namespace ltx
