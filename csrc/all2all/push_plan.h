#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "all2all/exchange.h"

// How a GPU pushes: which bytes go where, and which blocks and threads of the kernel copy them. Plain arithmetic, which
// a CPU test can run; the kernel calls what it needs of it.
namespace ltx {

inline constexpr int kPushThreads = 512;  // of a block, of which there is one a multiprocessor
inline constexpr int kPushVectors = 4;    // that a thread has on their way at a time
inline constexpr int kMostVectorBytes = 16;
inline constexpr int kMostTeam = 256;
inline constexpr int kCopyDims = 3;

// One block (division.h) of one tensor: rows of adjoining bytes, as long as source and target let them be.
struct BlockCopy {
  const std::byte* source;
  std::byte* target;
  std::array<int64_t, kCopyDims> counts;          // rows, outermost dimension first
  std::array<int64_t, kCopyDims> source_strides;  // in bytes
  std::array<int64_t, kCopyDims> target_strides;
  int64_t row_bytes;

  constexpr int64_t num_rows() const { return counts[0] * counts[1] * counts[2]; }
  constexpr int64_t bytes() const { return num_rows() * row_bytes; }
};

// `target`: where the receiver's result begins.
BlockCopy make_block_copy(const ExchangeCall& call, const Block& block, const TensorView& x, std::byte* target);

// The largest access, a power of two of bytes, to which every row of all copies is aligned, and of whole ones.
int vector_bytes_of(const std::vector<BlockCopy>& copies);

// Teams of neighbouring threads copy pieces: at most kPushVectors vectors a thread, of one row.
struct Pieces {
  int team;  // threads
  int64_t row_vectors;
  int64_t in_row;
  int64_t total;
};

constexpr Pieces make_pieces(const BlockCopy& copy, int vector_bytes) {
  const int64_t row_vectors = copy.row_bytes / vector_bytes;
  int team = 1;
  while (team < kMostTeam && team * kPushVectors < row_vectors) team *= 2;
  const int64_t in_row = (row_vectors + team * kPushVectors - 1) / (team * kPushVectors);
  return {.team = team, .row_vectors = row_vectors, .in_row = in_row, .total = copy.num_rows() * in_row};
}

struct Piece {
  int64_t source;   // bytes from copy.source
  int64_t target;   // bytes from copy.target
  int64_t vectors;  // of it and of what follows it in its row
};

constexpr Piece piece_at(const BlockCopy& copy, const Pieces& pieces, int vector_bytes, int64_t piece_idx) {
  const auto idx = static_cast<uint64_t>(piece_idx);  // unsigned division is cheaper
  const uint64_t row = idx / static_cast<uint64_t>(pieces.in_row);
  const uint64_t first = (idx - row * pieces.in_row) * (pieces.team * kPushVectors);
  const uint64_t rows = row / static_cast<uint64_t>(copy.counts[2]);
  const auto inner = static_cast<int64_t>(row - rows * copy.counts[2]);
  const auto outer = static_cast<int64_t>(rows / static_cast<uint64_t>(copy.counts[1]));
  const int64_t middle = static_cast<int64_t>(rows) - outer * copy.counts[1];
  const int64_t offset = static_cast<int64_t>(first) * vector_bytes;
  return {.source = outer * copy.source_strides[0] + middle * copy.source_strides[1] + inner * copy.source_strides[2] +
                    offset,
          .target = outer * copy.target_strides[0] + middle * copy.target_strides[1] + inner * copy.target_strides[2] +
                    offset,
          .vectors = pieces.row_vectors - static_cast<int64_t>(first)};
}

// The blocks of the kernel that store to one peer.
struct Share {
  int first;
  int count;

  bool operator==(const Share&) const = default;
};

// Blocks for each peer by the bytes that it gets, one at least; at most num_blocks in all, and no more than keep busy.
// With fewer blocks than peers each block serves several.
std::vector<Share> divide_blocks(const std::vector<int64_t>& peer_bytes, int num_blocks);

}  // namespace ltx
