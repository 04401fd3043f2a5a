#include <algorithm>

#include "all2all/push_plan.h"

namespace ltx {

BlockCopy make_block_copy(const ExchangeCall& call, const Block& block, const TensorView& x, std::byte* target) {
  const int64_t element_bytes = size_of(call.dtype);
  const int64_t head_bytes = call.head_dim * element_bytes;
  const int64_t token_bytes = block.target_heads * head_bytes;
  const std::array<int64_t, kCopyDims> counts = {call.batch, block.tokens, block.heads};
  const std::array<int64_t, kCopyDims> source_strides = {x.stride(0) * element_bytes, x.stride(1) * element_bytes,
                                                         x.stride(2) * element_bytes};
  const std::array<int64_t, kCopyDims> target_strides = {block.target_tokens * token_bytes, token_bytes, head_bytes};
  BlockCopy copy{.source = static_cast<const std::byte*>(x.data) + block.source_token * source_strides[1] +
                           block.source_head * source_strides[2],
                 .target = target + block.target_token * target_strides[1] + block.target_head * target_strides[2],
                 .counts = {1, 1, 1},
                 .source_strides = {},
                 .target_strides = {},
                 .row_bytes = head_bytes};
  int kept = kCopyDims;  // dimensions from here on are those of the copy
  for (int dim = kCopyDims - 1; dim >= 0; --dim) {
    if (counts[dim] == 1) continue;
    if (kept == kCopyDims && source_strides[dim] == copy.row_bytes && target_strides[dim] == copy.row_bytes) {
      copy.row_bytes *= counts[dim];
      continue;
    }
    --kept;
    copy.counts[kept] = counts[dim];
    copy.source_strides[kept] = source_strides[dim];
    copy.target_strides[kept] = target_strides[dim];
  }
  return copy;
}

int vector_bytes_of(const std::vector<BlockCopy>& copies) {
  uint64_t bits = kMostVectorBytes;
  for (const BlockCopy& copy : copies) {
    if (copy.bytes() == 0) continue;
    bits |= reinterpret_cast<uintptr_t>(copy.source) | reinterpret_cast<uintptr_t>(copy.target) |
            static_cast<uint64_t>(copy.row_bytes);
    for (int dim = 0; dim < kCopyDims; ++dim) {
      bits |= static_cast<uint64_t>(copy.source_strides[dim]) | static_cast<uint64_t>(copy.target_strides[dim]);
    }
  }
  return static_cast<int>(bits & -bits);
}

std::vector<Share> divide_blocks(const std::vector<int64_t>& peer_bytes, int num_blocks) {
  constexpr int64_t kBlockBytes = int64_t{kPushThreads} * kPushVectors * kMostVectorBytes;
  const int num_peers = static_cast<int>(peer_bytes.size());
  std::vector<Share> shares(num_peers, {.first = 0, .count = 1});
  if (num_blocks < num_peers) {
    for (int peer = 0; peer < num_peers; ++peer) shares[peer].first = peer % num_blocks;
    return shares;
  }
  const auto bytes_of_block = [&](int peer) { return peer_bytes[peer] / shares[peer].count; };
  for (int left = num_blocks - num_peers; left > 0; --left) {
    int busiest = 0;
    for (int peer = 1; peer < num_peers; ++peer) {
      if (bytes_of_block(peer) > bytes_of_block(busiest)) busiest = peer;
    }
    if (bytes_of_block(busiest) <= kBlockBytes) break;
    ++shares[busiest].count;
  }
  for (int peer = 1; peer < num_peers; ++peer) shares[peer].first = shares[peer - 1].first + shares[peer - 1].count;
  return shares;
}

}  // namespace ltx
