#include "all2all/allgather/allgather.h"

#include <gtest/gtest.h>

namespace ltx {
namespace {

TEST(Allgather, SendsAllHeadsOfOwnTokens) {
  static constexpr int64_t kTokens[] = {3, 0, 4};
  constexpr Division kDivision{.world_size = 3, .rank_tokens = kTokens, .rank_heads = nullptr};
  EXPECT_EQ(allgather_block(kDivision, 9, 2), (Block{.tokens = 4,
                                                     .heads = 9,
                                                     .source_token = 0,
                                                     .source_head = 0,
                                                     .target_token = 3,
                                                     .target_head = 0,
                                                     .target_tokens = 7,
                                                     .target_heads = 9}));
}

}  // namespace
}  // namespace ltx
