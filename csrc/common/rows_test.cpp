#include "common/rows.h"

#include <gtest/gtest.h>

namespace ltx {
namespace {

TEST(Rows, DimensionsThatAreEvenlySpacedMerge) {
  Rows<2> rows;
  rows.append(2, {60, 0});
  rows.append(3, {20, 7});  // merges in the first tensor alone
  rows.append(1, {99, 99});
  rows.append(5, {4, 0});
  EXPECT_EQ(rows.count, 30);
  EXPECT_EQ(rows.rank, 3);
  EXPECT_EQ(rows.offset(0, 29), 60 + 2 * 20 + 4 * 4);
  EXPECT_EQ(rows.offset(1, 29), 2 * 7);
  Rows<1> merged;
  merged.append(2, {60});
  merged.append(3, {20});
  EXPECT_EQ(merged.rank, 1);
  EXPECT_EQ(merged.offset(0, 5), 100);
}

TEST(Rows, CountsAndOffsetsBeyond32Bits) {
  constexpr int64_t kInner = (int64_t{1} << 32) + 5;
  Rows<1> rows;
  rows.append(3, {1});
  rows.append(kInner, {10});
  EXPECT_EQ(rows.count, 3 * kInner);
  EXPECT_EQ(rows.offset(0, kInner + 7), 1 + 70);
  EXPECT_EQ(rows.offset(0, 2 * kInner + 7), 2 + 70);
  Rows<1> long_rows;  // few in the inner dimension
  long_rows.append(kInner, {1});
  long_rows.append(3, {10});
  EXPECT_EQ(long_rows.offset(0, 3 * kInner - 1), kInner - 1 + 20);
  EXPECT_FALSE(short_rows(rows).has_value());
}

TEST(Rows, ShortRowsLieWhereRowsDo) {
  Rows<2> rows;
  rows.append(4, {1000, 0});
  rows.append(5, {7, -3});
  const auto short_form = short_rows(rows);
  ASSERT_TRUE(short_form.has_value());
  for (uint32_t row = 0; row < 20; ++row) {
    const auto index = short_form->index(row);
    EXPECT_EQ(short_form->offset(0, index.outer, index.inner), row / 5 * 1000 + row % 5 * 7);
    for (uint32_t next = 0; next <= 5 && row + next < 20; ++next) {
      const int64_t at = row + next;
      EXPECT_EQ(short_form->offset(0, index, next), at / 5 * 1000 + at % 5 * 7);
      EXPECT_EQ(short_form->offset(1, index, next), at % 5 * -3);
    }
  }
  rows.append(2, {1, 1});
  EXPECT_FALSE(short_rows(rows).has_value());  // three dimensions
}

}  // namespace
}  // namespace ltx
