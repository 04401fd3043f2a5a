#pragma once

#include "all2all/division.h"

// send_recv_heads: from a share of the tokens with all heads to all tokens with a share of the heads.
//
//   x [batch, local tokens, heads, head_dim]  ->  out [batch, total tokens, rank_heads[rank], head_dim]
//   out[b, (tokens of lower ranks) + t, h] = x of token t's rank [b, t, (heads of lower ranks) + h]
//
// send_recv_qkv: the same for three tensors of one shape, in one exchange.
//
// rank_tokens and rank_heads may be any counts, zeros too; heads is their sum. x: any strides with a contiguous last
// dimension; out: contiguous. Bytes are copied, whatever the dtype: exact, deterministic.
namespace ltx {

constexpr Block send_recv_heads_block(const Division& division, int rank, int peer) {
  return {.tokens = division.rank_tokens[rank],
          .heads = division.rank_heads[peer],
          .source_token = 0,
          .source_head = sum_before(division.rank_heads, peer),
          .target_token = sum_before(division.rank_tokens, rank),
          .target_head = 0,
          .target_tokens = total_tokens(division),
          .target_heads = division.rank_heads[peer]};
}

}  // namespace ltx
