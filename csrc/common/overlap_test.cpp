#include "common/overlap.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace ltx {
namespace {

class OverlapTest : public testing::Test {
 protected:
  template <size_t kRank>
  TensorView at(int64_t byte, const std::array<int64_t, kRank>& sizes, const std::array<int64_t, kRank>& strides,
                DType dtype = DType::kBFloat16) {
    TensorView view = contiguous_view(memory_.data() + byte, dtype, sizes);
    std::copy(strides.begin(), strides.end(), view.strides.begin());
    return view;
  }

 private:
  std::vector<uint8_t> memory_ = std::vector<uint8_t>(1 << 16);
};

TEST_F(OverlapTest, ChunksOfAFusedProjectionAreApart) {
  const TensorView q = at<3>(0, {2, 5, 64}, {960, 192, 1});
  const TensorView k = at<3>(128, {2, 5, 64}, {960, 192, 1});
  EXPECT_FALSE(overlap(q, k));
  EXPECT_FALSE(overlap(k, q));
  EXPECT_FALSE(overlaps_itself(q));
}

TEST_F(OverlapTest, OneSharedByteIsAnOverlap) {
  const TensorView x = at<2>(0, {5, 64}, {192, 1});
  EXPECT_TRUE(overlap(x, x));
  EXPECT_FALSE(overlap(x, at<2>(128, {5, 64}, {192, 1})));
  EXPECT_TRUE(overlap(x, at<2>(127, {5, 64}, {192, 1})));
  EXPECT_FALSE(overlap(x, at<2>(256, {5, 64}, {192, 1})));  // ends where the second row of x begins
  EXPECT_TRUE(overlap(x, at<2>(257, {5, 64}, {192, 1})));
  EXPECT_FALSE(overlap(at<2>(128, {5, 64}, {192, 1}), x));
  EXPECT_TRUE(overlap(at<2>(127, {5, 64}, {192, 1}), x));
}

TEST_F(OverlapTest, TokensOfOneAllocationAreApart) {
  const TensorView video = at<3>(0, {2, 6, 8}, {80, 8, 1});
  EXPECT_FALSE(overlap(video, at<3>(96, {2, 4, 8}, {80, 8, 1})));
  EXPECT_TRUE(overlap(video, at<3>(80, {2, 4, 8}, {80, 8, 1})));
  EXPECT_FALSE(overlap(at<2>(0, {5, 8}, {16, 1}), at<2>(16, {5, 8}, {16, 1})));  // even and odd tokens
}

TEST_F(OverlapTest, BroadcastAndOtherDtypes) {
  const TensorView x = at<3>(0, {2, 6, 8}, {96, 16, 1});
  EXPECT_FALSE(overlap(x, at<3>(16, {2, 1, 8}, {96, 7, 1})));  // the row after the first one of each batch
  EXPECT_TRUE(overlap(x, at<3>(32, {2, 1, 8}, {96, 7, 1})));
  EXPECT_TRUE(overlap(x, at<3>(14, {2, 6, 8}, {0, 0, 1})));
  EXPECT_TRUE(overlap(x, at<2>(16, {4, 8}, {8, 1}, DType::kFloat32)));
  EXPECT_FALSE(overlap(x, at<2>(16, {2, 4}, {8, 1}, DType::kFloat32)));
}

TEST_F(OverlapTest, DifferentStridesAreSearched) {
  // Rows of 2 bytes at 0, 6, 12, ... and at 3, 13, 23, ...: 12 meets 13.
  EXPECT_TRUE(overlap(at<2>(0, {3, 2}, {6, 1}, DType::kFp8), at<2>(3, {2, 2}, {10, 1}, DType::kFp8)));
  EXPECT_FALSE(overlap(at<2>(0, {2, 2}, {6, 1}, DType::kFp8), at<2>(3, {2, 2}, {10, 1}, DType::kFp8)));
}

TEST_F(OverlapTest, EmptyTensorsOverlapNothing) {
  const TensorView x = at<2>(0, {5, 64}, {64, 1});
  EXPECT_FALSE(overlap(x, at<2>(0, {0, 64}, {64, 1})));
  EXPECT_FALSE(overlap(at<2>(0, {5, 0}, {64, 1}), x));
  EXPECT_FALSE(overlaps_itself(at<2>(0, {0, 64}, {0, 1})));
}

TEST_F(OverlapTest, OverlapsItself) {
  EXPECT_FALSE(overlaps_itself(at<3>(0, {2, 5, 64}, {64, 128, 1})));  // axes swapped
  EXPECT_FALSE(overlaps_itself(at<2>(0, {1, 64}, {0, 1})));
  EXPECT_TRUE(overlaps_itself(at<2>(0, {2, 64}, {0, 1})));   // expanded
  EXPECT_TRUE(overlaps_itself(at<2>(0, {2, 64}, {63, 1})));  // windows
  EXPECT_FALSE(overlaps_itself(at<2>(0, {2, 64}, {64, 1})));
}

}  // namespace
}  // namespace ltx
