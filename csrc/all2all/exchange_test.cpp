#include "all2all/exchange.h"

#include <gtest/gtest.h>

#include <set>

#include "common/message_of.h"

namespace ltx {
namespace {

using Sizes = std::array<int64_t, 4>;

TensorView tensor(const Sizes& sizes, DType dtype = DType::kBFloat16) { return contiguous_view(nullptr, dtype, sizes); }

// Rank 1 of three with 3, 2 and 4 tokens, which share 6 heads evenly.
Member member() {
  return {.rank = 1,
          .world_size = 3,
          .dtype = DType::kBFloat16,
          .max_elements = 1000,
          .rank_heads = std::nullopt,
          .rank_tokens = std::vector<int64_t>{3, 2, 4}};
}

ExchangeCall call_of(ExchangeOp op, const Member& member, const std::vector<TensorView>& tensors) {
  return make_call(op, member, tensors, Device::Kind::kCpu, "shm");
}

TEST(Exchange, SizesOfResults) {
  const ExchangeCall send = call_of(ExchangeOp::kSendRecvHeads, member(), {tensor({5, 2, 6, 8})});
  EXPECT_EQ(result_sizes(send, 1), (Sizes{5, 9, 2, 8}));
  EXPECT_EQ(result_bytes(send, 1), 5 * 9 * 2 * 8 * 2);
  const ExchangeCall gather = call_of(ExchangeOp::kGatherHeads, member(), {tensor({5, 9, 2, 8})});
  EXPECT_EQ(result_sizes(gather, 1), (Sizes{5, 2, 6, 8}));
  EXPECT_EQ(result_sizes(gather, 2), (Sizes{5, 4, 6, 8}));
  const ExchangeCall all = call_of(ExchangeOp::kAllgather, member(), {tensor({5, 2, 7, 8})});
  EXPECT_EQ(result_sizes(all, 0), (Sizes{5, 9, 7, 8}));
}

TEST(Exchange, UnevenHeads) {
  Member uneven = member();
  uneven.rank_heads = {0, 5, 2};
  const ExchangeCall send = call_of(ExchangeOp::kSendRecvHeads, uneven, {tensor({1, 2, 7, 8})});
  EXPECT_EQ(result_sizes(send, 0), (Sizes{1, 9, 0, 8}));
  EXPECT_EQ(result_sizes(send, 1), (Sizes{1, 9, 5, 8}));
  const ExchangeCall gather = call_of(ExchangeOp::kGatherHeads, uneven, {tensor({1, 9, 5, 8})});
  EXPECT_EQ(result_sizes(gather, 1), (Sizes{1, 2, 7, 8}));
}

TEST(Exchange, ResultsOfQkvLieOneAfterTheOther) {
  const TensorView x = tensor({1, 2, 6, 8});
  const ExchangeCall call = call_of(ExchangeOp::kSendRecvQkv, member(), {x, x, x});
  // 9 x 2 x 8 values of 2 bytes are 288: two units of 256.
  EXPECT_EQ(tensor_offset(call, 0, 2), 1024);
  EXPECT_EQ(slot_bytes_needed(call), 1536);
}

TEST(Exchange, HashDiffersWhereRanksDisagree) {
  const auto hash_for = [](ExchangeOp op, const Member& from, const Sizes& sizes, DType dtype = DType::kBFloat16) {
    return hash_of(call_of(op, from, {tensor(sizes, dtype)}));
  };
  Member other_tokens = member();
  other_tokens.rank_tokens = {4, 2, 3};
  Member other_heads = member();
  other_heads.rank_heads = {1, 2, 3};
  Member other_dtype = member();
  other_dtype.dtype = DType::kFloat16;
  const uint64_t hash = hash_for(ExchangeOp::kSendRecvHeads, member(), {1, 2, 6, 8});
  const std::set<uint64_t> all = {hash,
                                  hash_for(ExchangeOp::kAllgather, member(), {1, 2, 6, 8}),
                                  hash_for(ExchangeOp::kSendRecvHeads, member(), {2, 2, 6, 8}),
                                  hash_for(ExchangeOp::kSendRecvHeads, member(), {1, 2, 3, 8}),
                                  hash_for(ExchangeOp::kSendRecvHeads, member(), {1, 2, 6, 4}),
                                  hash_for(ExchangeOp::kSendRecvHeads, other_tokens, {1, 2, 6, 8}),
                                  hash_for(ExchangeOp::kSendRecvHeads, other_heads, {1, 2, 6, 8}),
                                  hash_for(ExchangeOp::kSendRecvHeads, other_dtype, {1, 2, 6, 8}, DType::kFloat16)};
  EXPECT_EQ(all.size(), 8u);
  Member other_rank = member();
  other_rank.rank = 0;
  EXPECT_EQ(hash_for(ExchangeOp::kSendRecvHeads, other_rank, {1, 3, 6, 8}), hash);
}

TEST(Exchange, ChecksItsTensors) {
  const auto message = [](const std::vector<TensorView>& tensors, ExchangeOp op = ExchangeOp::kSendRecvHeads) {
    return message_of([&] { call_of(op, member(), tensors); });
  };
  EXPECT_EQ(message({tensor({1, 2, 6, 8})}), "no error");
  TensorView x = tensor({1, 2, 6, 8});
  x.device = {Device::Kind::kCuda, 3};
  EXPECT_EQ(message({x}), "send_recv_heads: x must be on cpu (transport shm), got cuda:3");
  EXPECT_EQ(message({tensor({1, 2, 6, 8}, DType::kFloat32)}), "send_recv_heads: x must be bfloat16, got float32");
  EXPECT_EQ(message({contiguous_view(nullptr, DType::kBFloat16, std::array<int64_t, 2>{2, 48})}),
            "send_recv_heads: x must have 4 dimensions, got [2, 48]");
  EXPECT_EQ(message({tensor({1, 3, 6, 8})}),
            "send_recv_heads: x must have 2 tokens in dimension 1 (rank 1 of set_rank_tokens([3, 2, 4])), got 3");
  EXPECT_EQ(message({tensor({1, 2, 2, 8})}, ExchangeOp::kGatherHeads),
            "gather_heads: x must have 9 tokens in dimension 1 (rank 1 of set_rank_tokens([3, 2, 4])), got 2");
  EXPECT_EQ(message({tensor({1, 2, 7, 8})}),
            "send_recv_heads: x must have a number of heads in dimension 2 that is divisible by 3 ranks (others need "
            "rank_heads), got 7");
  x = tensor({1, 2, 6, 8});
  x.strides[3] = 2;
  EXPECT_EQ(message({x}), "send_recv_heads: x must have a contiguous last dimension, got stride 2");
  x = tensor({1, 2, 6, 8});
  EXPECT_EQ(message({x, tensor({1, 2, 3, 8}), x}, ExchangeOp::kSendRecvQkv),
            "send_recv_qkv: k must have shape [1, 2, 6, 8], got [1, 2, 3, 8]");
  TensorView none = x;
  none.device = {Device::Kind::kNone, 0};
  EXPECT_EQ(message({x, x, none}, ExchangeOp::kSendRecvQkv), "send_recv_qkv: v must be on cpu like q, got None");
}

TEST(Exchange, ChecksUnevenHeads) {
  Member uneven = member();
  uneven.rank_heads = {0, 5, 2};
  EXPECT_EQ(message_of([&] { call_of(ExchangeOp::kSendRecvHeads, uneven, {tensor({1, 2, 6, 8})}); }),
            "send_recv_heads: x must have 7 heads in dimension 2 (rank_heads [0, 5, 2]), got 6");
  EXPECT_EQ(message_of([&] { call_of(ExchangeOp::kGatherHeads, uneven, {tensor({1, 9, 2, 8})}); }),
            "gather_heads: x must have 5 heads in dimension 2 (rank_heads [0, 5, 2]), got 2");
}

TEST(Exchange, NeedsTokensOfRanks) {
  Member fresh = member();
  fresh.rank_tokens.reset();
  EXPECT_EQ(message_of([&] { call_of(ExchangeOp::kAllgather, fresh, {tensor({1, 2, 6, 8})}); }),
            "allgather: needs the tokens of each rank: call set_rank_tokens first");
}

TEST(Exchange, ResultsFitTheBuffers) {
  // 9 tokens of 2 heads of 8: 144 elements a batch. The rank with 4 tokens gathers 4 x 6 x 8 = 192.
  EXPECT_EQ(message_of([] { call_of(ExchangeOp::kSendRecvHeads, member(), {tensor({7, 2, 6, 8})}); }),
            "send_recv_heads: x must give each rank a result of at most 1000 elements (seqlen * hidden_dim), got 1008: "
            "needs seqlen * hidden_dim >= 1008");
  EXPECT_EQ(message_of([] { call_of(ExchangeOp::kGatherHeads, member(), {tensor({6, 9, 2, 8})}); }),
            "gather_heads: x must give each rank a result of at most 1000 elements (seqlen * hidden_dim), got 1152: "
            "needs seqlen * hidden_dim >= 1152");
  EXPECT_EQ(
      message_of([] { call_of(ExchangeOp::kAllgather, member(), {tensor({8, 2, 6, 8})}); }),
      "allgather: x must give each rank a result of at most 3000 elements (world_size * seqlen * hidden_dim), got "
      "3456: needs seqlen * hidden_dim >= 1152");
  Member huge = member();
  huge.rank_tokens = {int64_t{1} << 61, 2, 1};
  EXPECT_EQ(message_of([&] { call_of(ExchangeOp::kSendRecvHeads, huge, {tensor({1, 2, 6, 8})}); }).substr(0, 94),
            "send_recv_heads: x must give each rank a result of at most 1000 elements (seqlen * hidden_dim)");
}

TEST(Exchange, InputsLieApartFromWhatIsWritten) {
  std::array<std::byte, 3000> memory{};
  const auto at = [&](int64_t offset, int64_t tokens) {
    TensorView x = tensor({1, tokens, 6, 8});
    x.data = memory.data() + offset;
    return x;
  };
  const auto message = [&](ExchangeOp op, const std::vector<TensorView>& tensors) {
    const ExchangeCall call = call_of(op, member(), {tensor({1, 2, 6, 8})});
    return message_of([&] { check_apart(call, tensors, memory.data() + 1000, 1000); });
  };
  const std::string rule =
      " must not lie in the buffer that this call writes to, got a view of an earlier result (copy_out=True gives a "
      "copy)";
  for (const int64_t offset : {0, 999, 2000, 2500}) {
    EXPECT_EQ(message(ExchangeOp::kAllgather, {at(offset, 2)}), "no error") << offset;
  }
  for (const int64_t offset : {1000, 1500, 1999}) {
    EXPECT_EQ(message(ExchangeOp::kAllgather, {at(offset, 2)}), "allgather: x" + rule) << offset;
  }
  EXPECT_EQ(message(ExchangeOp::kSendRecvQkv, {at(0, 2), at(2000, 2), at(1024, 2)}), "send_recv_qkv: v" + rule);
  EXPECT_EQ(message(ExchangeOp::kAllgather, {at(1500, 0)}), "no error");  // nothing is read
}

TEST(Exchange, MessagesNameRanks) {
  Status status{.kind = Status::Kind::kTimeout, .op = 3, .rank = 1, .peers = 0b10000101, .epoch = 9};
  EXPECT_EQ(message_of(status, 2.5),
            "gather_heads: rank 1 waited in vain for ranks 0, 2 and 7 (call 9, timeout 2.5 s)");
  status.peers = 0b100;
  EXPECT_EQ(message_of(status, 10), "gather_heads: rank 1 waited in vain for rank 2 (call 9, timeout 10 s)");
  status.kind = Status::Kind::kMismatch;
  EXPECT_EQ(message_of(status, 10),
            "gather_heads: ranks 1 and 2 must agree on op, rank_tokens, shape, heads and dtype, got others (call 9)");
  status.peers = 0b1101;
  EXPECT_EQ(message_of(status, 10).substr(0, 44), "gather_heads: ranks 1, 0, 2 and 3 must agree");
  const Status in_set_up{.kind = Status::Kind::kTimeout, .rank = 1, .peers = 0b101};
  EXPECT_EQ(message_of(in_set_up, 3), "All2All: rank 1 waited in vain for ranks 0 and 2 (timeout 3 s)");
}

}  // namespace
}  // namespace ltx
