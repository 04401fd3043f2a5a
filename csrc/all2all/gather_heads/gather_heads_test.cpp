#include "all2all/gather_heads/gather_heads.h"

#include <gtest/gtest.h>

#include "all2all/send_recv_heads/send_recv_heads.h"

namespace ltx {
namespace {

constexpr int64_t kTokens[] = {3, 0, 4};
constexpr int64_t kHeads[] = {2, 5, 1};
constexpr Division kDivision{.world_size = 3, .rank_tokens = kTokens, .rank_heads = kHeads};

TEST(GatherHeads, SendsAPeersTokensOfOwnHeads) {
  EXPECT_EQ(gather_heads_block(kDivision, 1, 2), (Block{.tokens = 4,
                                                        .heads = 5,
                                                        .source_token = 3,
                                                        .source_head = 0,
                                                        .target_token = 0,
                                                        .target_head = 2,
                                                        .target_tokens = 4,
                                                        .target_heads = 8}));
}

TEST(GatherHeads, IsTheInverseOfSendRecvHeads) {
  for (int rank = 0; rank < 3; ++rank) {
    for (int peer = 0; peer < 3; ++peer) {
      const Block there = send_recv_heads_block(kDivision, rank, peer);
      const Block back = gather_heads_block(kDivision, peer, rank);
      EXPECT_EQ(back.tokens, there.tokens);
      EXPECT_EQ(back.heads, there.heads);
      EXPECT_EQ(back.source_token, there.target_token);
      EXPECT_EQ(back.source_head, there.target_head);
      EXPECT_EQ(back.target_token, there.source_token);
      EXPECT_EQ(back.target_head, there.source_head);
    }
  }
}

}  // namespace
}  // namespace ltx
