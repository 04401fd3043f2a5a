#include "all2all/push_plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

namespace ltx {
namespace {

// What the kernel does, on this CPU: all threads of all blocks of one share, one after the other.
void run_share(const BlockCopy& copy, const Share& share, int vector_bytes) {
  const Pieces pieces = make_pieces(copy, vector_bytes);
  const int teams = kPushThreads / pieces.team;
  for (int block = 0; block < share.count; ++block) {
    for (int thread = 0; thread < kPushThreads; ++thread) {
      for (int64_t i = block * teams + thread / pieces.team; i < pieces.total; i += int64_t{share.count} * teams) {
        const Piece piece = piece_at(copy, pieces, vector_bytes, i);
        for (int j = 0; j < kPushVectors; ++j) {
          const int64_t vector = thread % pieces.team + j * pieces.team;
          if (vector >= piece.vectors) continue;
          std::memcpy(copy.target + piece.target + vector * vector_bytes,
                      copy.source + piece.source + vector * vector_bytes, vector_bytes);
        }
      }
    }
  }
}

struct Case {
  const char* path;
  ExchangeOp op;
  std::vector<int64_t> tokens;
  std::vector<int64_t> heads;
  int64_t head_dim;
  int64_t pad_heads;  // between tokens of x: a slice of a fused projection
  int64_t pad_dims;   // between heads of x
  int vector_bytes;
};

// Every rank's x is divided and copied to all, and each result is compared with plain indexing: the bytes of the
// element (b, token, head, d) of the whole tensor name it.
void gives_plain_indexing(const Case& test) {
  const auto world_size = static_cast<int>(test.tokens.size());
  const int64_t tokens = std::accumulate(test.tokens.begin(), test.tokens.end(), int64_t{0});
  const int64_t heads = std::accumulate(test.heads.begin(), test.heads.end(), int64_t{0});
  constexpr int64_t kBatch = 2;
  const auto element = [&](int64_t b, int64_t t, int64_t h, int64_t d) {
    return static_cast<uint16_t>(((b * tokens + t) * heads + h) * test.head_dim + d);
  };
  const bool gathers = test.op == ExchangeOp::kGatherHeads;
  std::vector<std::vector<uint16_t>> results(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    const int64_t first_token = gathers ? 0 : sum_before(test.tokens.data(), rank);
    const int64_t first_head = gathers ? sum_before(test.heads.data(), rank) : 0;
    const int64_t own_tokens = gathers ? tokens : test.tokens[rank];
    const int64_t own_heads = gathers ? test.heads[rank] : heads;
    const int64_t head_stride = test.head_dim + test.pad_dims;
    const int64_t token_stride = own_heads * head_stride + test.pad_heads * head_stride;
    std::vector<uint16_t> x(kBatch * own_tokens * token_stride + 1, 0xFFFF);
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t t = 0; t < own_tokens; ++t)
        for (int64_t h = 0; h < own_heads; ++h)
          for (int64_t d = 0; d < test.head_dim; ++d)
            x[(b * own_tokens + t) * token_stride + h * head_stride + d] =
                element(b, first_token + t, first_head + h, d);
    TensorView view = contiguous_view(x.data(), DType::kBFloat16,
                                      std::array<int64_t, 4>{kBatch, own_tokens, own_heads, test.head_dim});
    view.strides[2] = head_stride;
    view.strides[1] = token_stride;
    view.strides[0] = own_tokens * token_stride;
    const Member member{.rank = rank,
                        .world_size = world_size,
                        .dtype = DType::kBFloat16,
                        .max_elements = 1 << 20,
                        .rank_heads = test.heads,
                        .rank_tokens = test.tokens};
    const ExchangeCall call = make_call(test.op, member, {view}, Device::Kind::kCpu, "shm");
    std::vector<BlockCopy> copies;
    std::vector<int64_t> peer_bytes;
    for (int peer = 0; peer < world_size; ++peer) {
      results[peer].resize(result_bytes(call, peer) / 2 + 8, 0xFFFF);
      copies.push_back(make_block_copy(call, block_between(call, rank, peer), view,
                                       reinterpret_cast<std::byte*>(results[peer].data())));
      peer_bytes.push_back(copies.back().bytes());
    }
    const int vector_bytes = vector_bytes_of(copies);
    EXPECT_EQ(vector_bytes, test.vector_bytes) << test.path << ", rank " << rank;
    const std::vector<Share> shares = divide_blocks(peer_bytes, 7);
    for (int peer = 0; peer < world_size; ++peer) run_share(copies[peer], shares[peer], vector_bytes);
  }
  for (int rank = 0; rank < world_size; ++rank) {
    const bool divides_heads = test.op == ExchangeOp::kSendRecvHeads;
    const int64_t first_token = gathers ? sum_before(test.tokens.data(), rank) : 0;
    const int64_t first_head = divides_heads ? sum_before(test.heads.data(), rank) : 0;
    const int64_t out_tokens = gathers ? test.tokens[rank] : tokens;
    const int64_t out_heads = divides_heads ? test.heads[rank] : heads;
    std::vector<uint16_t> expected;
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t t = 0; t < out_tokens; ++t)
        for (int64_t h = 0; h < out_heads; ++h)
          for (int64_t d = 0; d < test.head_dim; ++d)
            expected.push_back(element(b, first_token + t, first_head + h, d));
    expected.resize(expected.size() + 8, 0xFFFF);  // nothing beyond it is written
    EXPECT_EQ(results[rank], expected) << test.path << ", rank " << rank;
  }
}

TEST(PushPlan, ThreadsCopyEveryElementToItsPlace) {
  using Op = ExchangeOp;
  for (const Case& test : {
           Case{"heads of 16 bytes", Op::kSendRecvHeads, {3, 4, 2}, {2, 2, 2}, 8, 0, 0, 16},
           Case{"a slice of a fused projection", Op::kSendRecvHeads, {3, 4}, {2, 1}, 8, 3, 0, 16},
           Case{"heads apart", Op::kGatherHeads, {3, 4}, {2, 1}, 8, 1, 8, 16},
           Case{"heads apart by 4 bytes", Op::kGatherHeads, {3, 4}, {2, 1}, 8, 0, 2, 4},
           Case{"rows of 6 bytes", Op::kAllgather, {5, 1}, {1, 2}, 3, 0, 2, 2},
           Case{"a rank without tokens", Op::kSendRecvHeads, {0, 6, 1}, {2, 2, 2}, 8, 0, 0, 16},
           Case{"a rank without heads", Op::kGatherHeads, {2, 3}, {0, 3}, 8, 0, 0, 16},
           Case{"no tokens at all", Op::kAllgather, {0, 0}, {1, 1}, 8, 0, 0, 16},
           Case{"one rank", Op::kAllgather, {7}, {3}, 8, 0, 0, 16},
           Case{"rows longer than a team's piece", Op::kSendRecvHeads, {2, 1}, {3, 1}, 6008, 0, 0, 16},
           Case{"eight ranks, more than blocks",
                Op::kSendRecvHeads,
                {1, 2, 3, 0, 1, 2, 3, 4},
                {3, 3, 3, 3, 2, 2, 2, 2},
                8,
                0,
                0,
                16},
       }) {
    gives_plain_indexing(test);
  }
}

ExchangeCall allgather_call(std::vector<int64_t> tokens) {
  return {.op = ExchangeOp::kAllgather,
          .rank = 1,
          .world_size = 2,
          .rank_tokens = std::move(tokens),
          .rank_heads = {},
          .batch = 1,
          .heads = 4,
          .head_dim = 8,
          .dtype = DType::kBFloat16,
          .num_tensors = 1};
}

TEST(PushPlan, RowsThatAdjoinOnBothSidesAreOne) {
  const ExchangeCall call = allgather_call({3, 5});
  alignas(16) std::array<std::byte, 1024> memory{};
  TensorView x = contiguous_view(memory.data(), DType::kBFloat16, std::array<int64_t, 4>{1, 5, 4, 8});
  const BlockCopy whole = make_block_copy(call, block_between(call, 1, 0), x, memory.data());
  EXPECT_EQ(whole.num_rows(), 1);
  EXPECT_EQ(whole.row_bytes, 5 * 4 * 8 * 2);
  EXPECT_EQ(whole.target - memory.data(), 3 * 4 * 8 * 2);
  x.strides[1] = 100;
  const BlockCopy slice = make_block_copy(call, block_between(call, 1, 0), x, memory.data());
  EXPECT_EQ(slice.num_rows(), 5);
  EXPECT_EQ(slice.row_bytes, 4 * 8 * 2);
  EXPECT_EQ(slice.source_strides, (std::array<int64_t, 3>{0, 0, 200}));
  EXPECT_EQ(slice.target_strides, (std::array<int64_t, 3>{0, 0, 64}));
}

TEST(PushPlan, VectorIsTheLargestThatEveryAddressOfEveryRowAllows) {
  alignas(16) std::array<std::byte, 256> memory{};
  const auto copy = [&](int source, int target, int64_t row_bytes, int64_t stride) {
    return BlockCopy{.source = memory.data() + source,
                     .target = memory.data() + target,
                     .counts = {1, 1, 2},
                     .source_strides = {0, 0, stride},
                     .target_strides = {0, 0, 64},
                     .row_bytes = row_bytes};
  };
  EXPECT_EQ(vector_bytes_of({copy(0, 0, 64, 64)}), 16);
  EXPECT_EQ(vector_bytes_of({copy(8, 0, 64, 64)}), 8);
  EXPECT_EQ(vector_bytes_of({copy(0, 4, 64, 64)}), 4);
  EXPECT_EQ(vector_bytes_of({copy(0, 0, 62, 64)}), 2);
  EXPECT_EQ(vector_bytes_of({copy(0, 0, 64, 65)}), 1);
  EXPECT_EQ(vector_bytes_of({copy(0, 0, 64, 64), copy(0, 0, 24, 64)}), 8);
  EXPECT_EQ(vector_bytes_of({copy(0, 0, 64, 64), copy(1, 1, 0, 1)}), 16);  // nothing of it is copied
}

TEST(PushPlan, BlocksGoWhereTheBytesAre) {
  constexpr int64_t kMuch = int64_t{1} << 30;
  EXPECT_EQ(divide_blocks({kMuch, kMuch, kMuch, kMuch}, 132),
            (std::vector<Share>{{0, 33}, {33, 33}, {66, 33}, {99, 33}}));
  EXPECT_EQ(divide_blocks({3 * kMuch, 0, kMuch}, 9), (std::vector<Share>{{0, 6}, {6, 1}, {7, 2}}));
  EXPECT_EQ(divide_blocks({16, 0}, 132), (std::vector<Share>{{0, 1}, {1, 1}}));
  EXPECT_EQ(divide_blocks({200000, 65536}, 132), (std::vector<Share>{{0, 7}, {7, 2}}));  // a block does 32768 at a time
  EXPECT_EQ(divide_blocks({kMuch, kMuch, kMuch}, 2), (std::vector<Share>{{0, 1}, {1, 1}, {0, 1}}));
}

}  // namespace
}  // namespace ltx
