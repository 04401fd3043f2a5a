#pragma once

#include "all2all/division.h"

// gather_heads: from all tokens with a share of the heads to a share of the tokens with all heads; the inverse of
// send_recv_heads.
//
//   x [batch, total tokens, rank_heads[rank], head_dim]  ->  out [batch, local tokens, heads, head_dim]
//   out[b, t, (heads of lower ranks) + h] = x of head h's rank [b, (tokens of lower ranks) + t, h]
//
// Strides, counts and bytes as in send_recv_heads.
namespace ltx {

constexpr Block gather_heads_block(const Division& division, int rank, int peer) {
  return {.tokens = division.rank_tokens[peer],
          .heads = division.rank_heads[rank],
          .source_token = sum_before(division.rank_tokens, peer),
          .source_head = 0,
          .target_token = 0,
          .target_head = sum_before(division.rank_heads, rank),
          .target_tokens = division.rank_tokens[peer],
          .target_heads = total_heads(division)};
}

}  // namespace ltx
