#include "all2all/shm_communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "common/message_of.h"

namespace ltx {
namespace {

using Counts = std::vector<int64_t>;

// All ranks of a communicator, each a thread for the time of a test.
struct Ranks {
  Counts tokens;
  Counts heads;
  int64_t batch = 2;
  int64_t head_dim = 3;
  Layout layout{};
  std::shared_ptr<SharedMemory> memory;
  std::vector<std::unique_ptr<ShmCommunicator>> ends;

  Ranks(Counts rank_tokens, Counts rank_heads, int64_t result_bytes = 4096)
      : tokens(std::move(rank_tokens)), heads(std::move(rank_heads)) {
    layout = make_layout(size(), result_bytes);
    memory = SharedMemory::create(shm_workspace_bytes(layout) * size());
    for (int rank = 0; rank < size(); ++rank) {
      ends.push_back(std::make_unique<ShmCommunicator>(memory, rank, size(), layout));
      ends.back()->set_timeout(20);
    }
  }

  int size() const { return static_cast<int>(tokens.size()); }
  int64_t total(const Counts& counts) const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

  Member member(int rank) const {
    return {.rank = rank,
            .world_size = size(),
            .dtype = DType::kFloat32,
            .max_elements = 1024,
            .rank_heads = heads,
            .rank_tokens = tokens};
  }

  Control& control(int rank) const {
    return *reinterpret_cast<Control*>(memory->data() + rank * shm_workspace_bytes(layout));
  }

  void each(const std::function<void(int)>& body) const {
    std::vector<std::thread> threads;
    threads.reserve(size());
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }
};

// The element of the whole tensor, before it was divided.
float element(int64_t round, int64_t b, int64_t token, int64_t head, int64_t d) {
  return static_cast<float>(round * 100000 + b * 10000 + token * 100 + head * 10 + d);
}

int64_t before(const Counts& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
}

// A part of the whole tensor: these tokens with these heads.
struct Part {
  int64_t batch, first_token, tokens, first_head, heads, head_dim;

  std::vector<float> values(int64_t round) const {
    std::vector<float> all;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t d = 0; d < head_dim; ++d) all.push_back(element(round, b, first_token + t, first_head + h, d));
    return all;
  }
  TensorView view(std::vector<float>& values) const {
    return contiguous_view(values.data(), DType::kFloat32, std::array<int64_t, 4>{batch, tokens, heads, head_dim});
  }
};

Part tokens_of(const Ranks& ranks, int rank) {
  return {ranks.batch, before(ranks.tokens, rank), ranks.tokens[rank], 0, ranks.total(ranks.heads), ranks.head_dim};
}
Part heads_of(const Ranks& ranks, int rank) {
  return {ranks.batch, 0, ranks.total(ranks.tokens), before(ranks.heads, rank), ranks.heads[rank], ranks.head_dim};
}
Part everything(const Ranks& ranks) {
  return {ranks.batch, 0, ranks.total(ranks.tokens), 0, ranks.total(ranks.heads), ranks.head_dim};
}

// One call, and whether each of its results is `expected`.
bool gives(const Ranks& ranks, int rank, ExchangeOp op, int64_t round, const Part& from, const Part& to,
           bool copy_out) {
  const int num_tensors = op == ExchangeOp::kSendRecvQkv ? 3 : 1;
  std::vector<std::vector<float>> inputs;
  std::vector<std::vector<float>> outputs;
  std::vector<TensorView> views;
  std::vector<std::byte*> outs;
  for (int i = 0; i < num_tensors; ++i) {
    inputs.push_back(from.values(round + i));
    outputs.push_back(to.values(-1));
  }
  for (int i = 0; i < num_tensors; ++i) {
    views.push_back(from.view(inputs[i]));
    if (copy_out) outs.push_back(reinterpret_cast<std::byte*>(outputs[i].data()));
  }
  const ExchangeCall call = make_call(op, ranks.member(rank), views, Device::Kind::kCpu, "shm");
  const auto where = ranks.ends[rank]->run(call, views, outs);
  bool equal = true;
  for (int i = 0; i < num_tensors; ++i) {
    const std::vector<float> expected = to.values(round + i);
    const auto* got = reinterpret_cast<const float*>(where[i]);
    equal = equal && std::equal(expected.begin(), expected.end(), got);
  }
  return equal;
}

void every_op(const Ranks& ranks, int rank, int rounds) {
  std::mt19937 random(rank);
  for (int round = 0; round < rounds; ++round) {
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    const bool copy_out = random() % 2 == 0;  // each rank as it likes
    const Part own = tokens_of(ranks, rank);
    const Part share = heads_of(ranks, rank);
    ASSERT_TRUE(gives(ranks, rank, ExchangeOp::kSendRecvHeads, round, own, share, copy_out)) << rank << " " << round;
    ASSERT_TRUE(gives(ranks, rank, ExchangeOp::kGatherHeads, round, share, own, copy_out)) << rank << " " << round;
    ASSERT_TRUE(gives(ranks, rank, ExchangeOp::kSendRecvQkv, round, own, share, copy_out)) << rank << " " << round;
    ASSERT_TRUE(gives(ranks, rank, ExchangeOp::kAllgather, round, own, everything(ranks), copy_out)) << rank;
  }
}

TEST(ShmCommunicator, EveryOpUnderSkew) {
  for (const auto& [tokens, heads] : {std::pair<Counts, Counts>{{3, 4}, {2, 2}},
                                      {{3, 0, 4}, {2, 5, 1}},
                                      {{0, 0}, {1, 0}},
                                      {{7}, {3}},
                                      {{1, 2, 0, 1, 3, 1, 1, 2}, {1, 1, 0, 1, 1, 2, 1, 0}}}) {
    const Ranks ranks(tokens, heads);
    ranks.each([&](int rank) { every_op(ranks, rank, 50); });
  }
}

TEST(ShmCommunicator, ReadsStridedTensors) {
  // Heads with a gap between them, as in a slice of a fused projection.
  const Ranks ranks({2, 1}, {1, 2});
  ranks.each([&](int rank) {
    const Part part = tokens_of(ranks, rank);
    const std::vector<float> dense = part.values(1);
    std::vector<float> spread(dense.size() * 2, -1);
    for (size_t row = 0; row < dense.size() / 3; ++row) {
      std::copy_n(dense.begin() + row * 3, 3, spread.begin() + row * 6);
    }
    TensorView x = part.view(spread);
    for (int dim = 0; dim < 3; ++dim) x.strides[dim] *= 2;
    const ExchangeCall call = make_call(ExchangeOp::kSendRecvHeads, ranks.member(rank), {x}, Device::Kind::kCpu, "shm");
    const auto where = ranks.ends[rank]->run(call, {x}, {});
    const std::vector<float> expected = heads_of(ranks, rank).values(1);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), reinterpret_cast<const float*>(where[0])));
  });
}

TEST(ShmCommunicator, ResultStaysUntilTheNextCall) {
  // Rank 0 has its result of call 1 while rank 1 is as far as the protocol lets it: it waits in call 2.
  const Ranks ranks({2, 2}, {1, 1});
  ranks.each([&](int rank) {
    std::vector<float> values = tokens_of(ranks, rank).values(1);
    const TensorView x = tokens_of(ranks, rank).view(values);
    const ExchangeCall call = make_call(ExchangeOp::kSendRecvHeads, ranks.member(rank), {x}, Device::Kind::kCpu, "shm");
    const std::vector<float> expected = heads_of(ranks, rank).values(1);
    const auto where = ranks.ends[rank]->run(call, {x}, {});
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), reinterpret_cast<const float*>(where[0])));
    for (int64_t round = 2; round < 6; ++round) {
      ASSERT_TRUE(
          gives(ranks, rank, ExchangeOp::kSendRecvHeads, round, tokens_of(ranks, rank), heads_of(ranks, rank), false));
    }
  });
}

std::string call_message(const Ranks& ranks, int rank, ExchangeOp op = ExchangeOp::kSendRecvHeads) {
  return message_of([&] { gives(ranks, rank, op, 0, tokens_of(ranks, rank), heads_of(ranks, rank), true); });
}

TEST(ShmCommunicator, TimeoutNamesWhoDidNotArrive) {
  const Ranks ranks({1, 1, 1, 1}, {1, 1, 1, 1});
  for (const auto& end : ranks.ends) end->set_timeout(0.5);
  std::vector<std::string> messages(4);
  ranks.each([&](int rank) {
    if (rank % 2 == 0) messages[rank] = call_message(ranks, rank);
  });
  EXPECT_EQ(messages[0], "send_recv_heads: rank 0 waited in vain for ranks 1 and 3 (call 1, timeout 0.5 s)");
  EXPECT_EQ(messages[2], "send_recv_heads: rank 2 waited in vain for ranks 1 and 3 (call 1, timeout 0.5 s)");
  // The communicator is dead: the next call says the same, at once, and so does check.
  ranks.ends[0]->set_timeout(1000);
  EXPECT_EQ(call_message(ranks, 0), "send_recv_heads: rank 0 waited in vain for ranks 1 and 3 (call 1, timeout 0.5 s)");
  EXPECT_EQ(message_of([&] { ranks.ends[0]->check(); }), messages[0]);
  EXPECT_EQ(message_of([&] { ranks.ends[1]->check(); }), "no error");
}

// What a rank posts to one peer in a call, in place of a rank that does no more.
void post_arrival(const Ranks& ranks, int sender, int receiver, ExchangeOp op, uint64_t epoch) {
  std::vector<float> values = tokens_of(ranks, sender).values(0);
  const ExchangeCall call =
      make_call(op, ranks.member(sender), {tokens_of(ranks, sender).view(values)}, Device::Kind::kCpu, "shm");
  ranks.control(receiver).from[sender].arrived[epoch % kNumSlots] = {.epoch = epoch, .hash = hash_of(call)};
}

TEST(ShmCommunicator, ResultMayBeTheInputOfTheNextCall) {
  // In call 2 rank 0 has posted to rank 1, and waits for the memory of rank 2: it has more to read of its input.
  Ranks ranks({1, 1, 1}, {1, 1, 1}, 1024);
  ranks.head_dim = 40;
  ranks.ends[1]->reserve_all();
  for (const int sender : {1, 2}) {
    post_arrival(ranks, sender, 0, ExchangeOp::kSendRecvHeads, 1);
    post_arrival(ranks, sender, 0, ExchangeOp::kAllgather, 2);
  }
  const auto run = [&](ExchangeOp op) {
    std::vector<float> values = tokens_of(ranks, 0).values(0);
    const TensorView x = tokens_of(ranks, 0).view(values);
    ranks.ends[0]->run(make_call(op, ranks.member(0), {x}, Device::Kind::kCpu, "shm"), {x}, {});
  };
  run(ExchangeOp::kSendRecvHeads);
  std::thread second(run, ExchangeOp::kAllgather);
  FromPeer& seen = ranks.control(1).from[0];
  while (std::atomic_ref(seen.arrived[0].epoch).load() < 2) std::this_thread::yield();
  EXPECT_EQ(std::atomic_ref(seen.consumed).load(), 0u);
  ranks.ends[2]->reserve_all();
  second.join();
  EXPECT_EQ(seen.consumed, 1u);
}

TEST(ShmCommunicator, CopiedResultIsConsumedAtOnce) {
  Ranks ranks({1, 1}, {1, 1});
  post_arrival(ranks, 1, 0, ExchangeOp::kSendRecvHeads, 1);
  std::vector<float> values = tokens_of(ranks, 0).values(0);
  const TensorView x = tokens_of(ranks, 0).view(values);
  std::vector<float> out(heads_of(ranks, 0).values(0).size());
  ranks.ends[0]->run(make_call(ExchangeOp::kSendRecvHeads, ranks.member(0), {x}, Device::Kind::kCpu, "shm"), {x},
                     {reinterpret_cast<std::byte*>(out.data())});
  EXPECT_EQ(ranks.control(1).from[0].consumed, 1u);
}

TEST(ShmCommunicator, CallsBeyond32Bits) {
  const Ranks ranks({2, 1}, {1, 1});
  for (int rank = 0; rank < 2; ++rank) ranks.control(rank).epoch = 0xFFFFFFFC;
  ranks.each([&](int rank) { every_op(ranks, rank, 3); });
  EXPECT_EQ(ranks.control(1).epoch, 0x100000008);
}

TEST(ShmCommunicator, ThreeRanksOfWhichOneDisagrees) {
  const Ranks ranks({1, 1, 1}, {1, 1, 1});
  std::vector<std::string> messages(3);
  ranks.each([&](int rank) {
    messages[rank] = message_of([&] {
      const bool all = rank == 1;
      gives(ranks, rank, all ? ExchangeOp::kAllgather : ExchangeOp::kSendRecvHeads, 0, tokens_of(ranks, rank),
            all ? everything(ranks) : heads_of(ranks, rank), true);
    });
  });
  const std::string rule = " must agree on op, rank_tokens, shape, heads and dtype, got others (call 1)";
  EXPECT_EQ(messages[0], "send_recv_heads: ranks 0 and 1" + rule);
  EXPECT_EQ(messages[2], "send_recv_heads: ranks 2 and 1" + rule);
  EXPECT_EQ(messages[1].find("allgather: ranks 1"), 0u) << messages[1];  // and 0 or 2, or both: who came first
  EXPECT_NE(messages[1].find(rule), std::string::npos) << messages[1];
}

TEST(ShmCommunicator, CauseOfADeathIsNamed) {
  // Rank 2 dies after it has posted to rank 1 alone. So rank 0 waits in call 1, and rank 1 for rank 0 in call 2.
  const Ranks ranks({1, 0, 0}, {1, 1, 1});
  post_arrival(ranks, 2, 1, ExchangeOp::kSendRecvHeads, 1);
  ranks.ends[0]->set_timeout(0.3);
  ranks.ends[1]->set_timeout(100);
  std::vector<std::string> messages(3);
  const auto begin = std::chrono::steady_clock::now();
  ranks.each([&](int rank) {
    if (rank == 2) return;
    messages[rank] = call_message(ranks, rank);
    if (rank == 1 && messages[1] == "no error") messages[1] = call_message(ranks, 1);
  });
  EXPECT_EQ(messages[0], "send_recv_heads: rank 0 waited in vain for rank 2 (call 1, timeout 0.3 s)");
  EXPECT_EQ(messages[1], "send_recv_heads: rank 1 waited in vain for rank 2 (call 2, timeout 100 s)");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));  // not 100
}

TEST(ShmCommunicator, SlowRanksFindOutWhoGaveUp) {
  // Rank 0 gives up in call 1, having posted: the others have their results, and miss it in call 2.
  const Ranks ranks({1, 1, 1}, {1, 1, 1});
  ranks.ends[0]->set_timeout(0.1);
  std::vector<std::string> messages(3);
  ranks.each([&](int rank) {
    if (rank != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      EXPECT_EQ(call_message(ranks, rank), "no error");
    }
    messages[rank] = call_message(ranks, rank);
  });
  EXPECT_EQ(messages[0], "send_recv_heads: rank 0 waited in vain for ranks 1 and 2 (call 1, timeout 0.1 s)");
  EXPECT_EQ(messages[1], "send_recv_heads: rank 1 waited in vain for rank 0 (call 2, timeout 20 s)");
  EXPECT_EQ(messages[2], "send_recv_heads: rank 2 waited in vain for rank 0 (call 2, timeout 20 s)");
}

TEST(ShmCommunicator, DisagreementIsNamedOnBothRanks) {
  for (const ExchangeOp other : {ExchangeOp::kSendRecvQkv, ExchangeOp::kAllgather}) {
    const Ranks ranks({1, 1}, {1, 1}, 256);
    std::vector<std::string> messages(2);
    ranks.each([&](int rank) {
      const bool all = rank == 1 && other == ExchangeOp::kAllgather;
      messages[rank] = message_of([&] {
        gives(ranks, rank, rank == 0 ? ExchangeOp::kSendRecvHeads : other, 0, tokens_of(ranks, rank),
              all ? everything(ranks) : heads_of(ranks, rank), true);
      });
    });
    const std::string rule = " must agree on op, rank_tokens, shape, heads and dtype, got others (call 1)";
    EXPECT_EQ(messages[0], "send_recv_heads: ranks 0 and 1" + rule);
    EXPECT_EQ(messages[1], std::string(name_of(other)) + ": ranks 1 and 0" + rule);
    EXPECT_EQ(ranks.ends[0]->status().kind, Status::Kind::kMismatch);
  }
}

TEST(ShmCommunicator, StoresNothingWhereAPeerHasNoMemory) {
  // Rank 0 gathers 1280 bytes, more than one result. Rank 1 does not come, so its slots stay at 256.
  Ranks ranks({1, 1}, {1, 1}, 256);
  ranks.head_dim = 40;
  ranks.ends[0]->set_timeout(0.1);
  EXPECT_EQ(
      message_of([&] { gives(ranks, 0, ExchangeOp::kAllgather, 7, tokens_of(ranks, 0), everything(ranks), true); }),
      "allgather: rank 0 waited in vain for rank 1 (call 1, timeout 0.1 s)");
  const std::byte* workspace = ranks.memory->data() + shm_workspace_bytes(ranks.layout);
  EXPECT_TRUE(std::all_of(workspace + ranks.layout.slot_offset(0), workspace + ranks.layout.total_bytes(),
                          [](std::byte value) { return value == std::byte{0}; }));
}

TEST(ShmCommunicator, AllgatherMemoryIsHadWhenACallNeedsIt) {
  const Ranks ranks({2, 2, 2, 2}, {1, 1, 1, 1}, 1 << 20);
  const auto pages = [&] {
    int64_t held = 0;
    for (int rank = 0; rank < 4; ++rank) {
      held += static_cast<int64_t>(ranks.control(rank).capacity_bytes);
    }
    return held;
  };
  EXPECT_EQ(pages(), 4 << 20);
  ranks.ends[2]->reserve_all();
  EXPECT_EQ(pages(), (3 + 4) << 20);
  ranks.each([&](int rank) { every_op(ranks, rank, 1); });
  EXPECT_EQ(pages(), (3 + 4) << 20);  // small results needed no more
}

}  // namespace
}  // namespace ltx
