#pragma once

#include <cstdint>

// How tokens and heads are divided among ranks, and what one rank sends to another: plain arithmetic for host and
// device. The rooms' headers have one function each, <op>_block.
namespace ltx {

enum class ExchangeOp : uint8_t { kSendRecvHeads = 1, kSendRecvQkv, kGatherHeads, kAllgather };

constexpr const char* name_of(ExchangeOp op) {
  switch (op) {
    case ExchangeOp::kSendRecvHeads:
      return "send_recv_heads";
    case ExchangeOp::kSendRecvQkv:
      return "send_recv_qkv";
    case ExchangeOp::kGatherHeads:
      return "gather_heads";
    case ExchangeOp::kAllgather:
      return "allgather";
  }
  return "All2All";
}

struct Division {
  int world_size;
  const int64_t* rank_tokens;  // [world_size]
  const int64_t* rank_heads;   // [world_size]
};

constexpr int64_t sum_before(const int64_t* counts, int end) {
  int64_t sum = 0;
  for (int rank = 0; rank < end; ++rank) sum += counts[rank];
  return sum;
}

constexpr int64_t total_tokens(const Division& division) {
  return sum_before(division.rank_tokens, division.world_size);
}
constexpr int64_t total_heads(const Division& division) { return sum_before(division.rank_heads, division.world_size); }

// A block of tokens and heads that one rank sends to one peer: source[b, source_token + t, source_head + h] becomes
// target[b, target_token + t, target_head + h]. The target, the peer's result, is contiguous: [batch, target_tokens,
// target_heads, head_dim].
struct Block {
  int64_t tokens;
  int64_t heads;
  int64_t source_token;
  int64_t source_head;
  int64_t target_token;
  int64_t target_head;
  int64_t target_tokens;
  int64_t target_heads;

  bool operator==(const Block&) const = default;
};

}  // namespace ltx
