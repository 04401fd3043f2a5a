#pragma once

#include "all2all/division.h"

// allgather: all tokens with all heads on every rank, in rank order.
//
//   x [batch, local tokens, heads, head_dim]  ->  out [batch, total tokens, heads, head_dim]
//   out[b, (tokens of lower ranks) + t, h] = x of token t's rank [b, t, h]
//
// heads is x's own count, the same on all ranks. Strides, token counts and bytes as in send_recv_heads.
namespace ltx {

constexpr Block allgather_block(const Division& division, int64_t heads, int rank) {
  return {.tokens = division.rank_tokens[rank],
          .heads = heads,
          .source_token = 0,
          .source_head = 0,
          .target_token = sum_before(division.rank_tokens, rank),
          .target_head = 0,
          .target_tokens = total_tokens(division),
          .target_heads = heads};
}

}  // namespace ltx
