#include "all2all/send_recv_heads/send_recv_heads.h"

#include <gtest/gtest.h>

namespace ltx {
namespace {

// Three ranks with 3, 0 and 4 tokens and 2, 5 and 1 of 8 heads.
constexpr int64_t kTokens[] = {3, 0, 4};
constexpr int64_t kHeads[] = {2, 5, 1};
constexpr Division kDivision{.world_size = 3, .rank_tokens = kTokens, .rank_heads = kHeads};

TEST(SendRecvHeads, SendsAPeersHeadsOfAllTokens) {
  EXPECT_EQ(send_recv_heads_block(kDivision, 2, 1), (Block{.tokens = 4,
                                                           .heads = 5,
                                                           .source_token = 0,
                                                           .source_head = 2,
                                                           .target_token = 3,
                                                           .target_head = 0,
                                                           .target_tokens = 7,
                                                           .target_heads = 5}));
  EXPECT_EQ(send_recv_heads_block(kDivision, 0, 0), (Block{.tokens = 3,
                                                           .heads = 2,
                                                           .source_token = 0,
                                                           .source_head = 0,
                                                           .target_token = 0,
                                                           .target_head = 0,
                                                           .target_tokens = 7,
                                                           .target_heads = 2}));
}

TEST(SendRecvHeads, RankWithoutTokensSendsNone) {
  EXPECT_EQ(send_recv_heads_block(kDivision, 1, 2).tokens, 0);
  EXPECT_EQ(send_recv_heads_block(kDivision, 1, 2).target_tokens, 7);
}

}  // namespace
}  // namespace ltx
