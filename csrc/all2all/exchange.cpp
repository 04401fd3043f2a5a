#include <algorithm>
#include <limits>

#include "all2all/allgather/allgather.h"
#include "all2all/exchange.h"
#include "all2all/gather_heads/gather_heads.h"
#include "all2all/send_recv_heads/send_recv_heads.h"
#include "common/check.h"

namespace ltx {
namespace {

// Counts that a user sets need not be those of a tensor: their products may exceed 64 bits.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  bool overflow = false;
  for (const int64_t factor : factors) {
    if (factor == 0) return 0;
    overflow = __builtin_mul_overflow(result, factor, &result) || overflow;
  }
  return overflow ? std::numeric_limits<int64_t>::max() : result;
}

std::string must(ExchangeOp op, const char* name, const std::string& rule, const std::string& got) {
  return std::string(name_of(op)) + ": " + name + " must " + rule + ", got " + got;
}

const char* name_at(size_t tensor, size_t num_tensors) {
  static constexpr std::array<const char*, kQkvTensors> kQkvNames = {"q", "k", "v"};
  return num_tensors == 1 ? "x" : kQkvNames[tensor];
}

std::string list_of(const std::vector<int64_t>& counts) {
  return to_string(counts.data(), static_cast<int>(counts.size()));
}

std::vector<int64_t> heads_of_ranks(ExchangeOp op, const Member& member, const char* name, int64_t heads) {
  if (op == ExchangeOp::kAllgather) return {};
  const bool gathers = op == ExchangeOp::kGatherHeads;
  if (member.rank_heads) {
    const std::vector<int64_t>& rank_heads = *member.rank_heads;
    const int64_t expected = gathers ? rank_heads[member.rank] : sum_before(rank_heads.data(), member.world_size);
    LTX_CHECK(heads == expected, must(op, name,
                                      "have " + std::to_string(expected) + " heads in dimension 2 (rank_heads " +
                                          list_of(rank_heads) + ")",
                                      std::to_string(heads)));
    return rank_heads;
  }
  LTX_CHECK(gathers || heads % member.world_size == 0,
            must(op, name,
                 "have a number of heads in dimension 2 that is divisible by " + std::to_string(member.world_size) +
                     " ranks (others need rank_heads)",
                 std::to_string(heads)));
  return std::vector<int64_t>(member.world_size, gathers ? heads : heads / member.world_size);
}

std::string names_of(uint8_t peers) {
  std::string names;
  int left = __builtin_popcount(peers);
  for (int peer = 0; peer < kMaxRanks; ++peer) {
    if ((peers >> peer & 1) == 0) continue;
    --left;
    names += std::to_string(peer) + (left > 1 ? ", " : left == 1 ? " and " : "");
  }
  return names;
}

}  // namespace

ExchangeCall make_call(ExchangeOp op, const Member& member, const std::vector<TensorView>& tensors,
                       std::optional<Device::Kind> device_kind, const char* transport) {
  const char* op_name = name_of(op);
  const auto name = [&](size_t tensor) { return name_at(tensor, tensors.size()); };
  const TensorView& x = tensors[0];

  LTX_CHECK(member.rank_tokens, std::string(op_name) + ": needs the tokens of each rank: call set_rank_tokens first");
  for (size_t i = 0; i < tensors.size(); ++i) check_device(op_name, name(i), tensors[i], x.device, name(0));
  LTX_CHECK(!device_kind || x.device.kind == *device_kind,
            must(op, name(0),
                 std::string("be on ") + (device_kind == Device::Kind::kCpu ? "cpu" : "a CUDA device") +
                     " (transport " + transport + ")",
                 to_string(x.device)));
  for (size_t i = 0; i < tensors.size(); ++i) check_dtype(op_name, name(i), tensors[i], {member.dtype});
  for (size_t i = 0; i < tensors.size(); ++i) check_rank(op_name, name(i), tensors[i], 4);

  const std::vector<int64_t>& rank_tokens = *member.rank_tokens;
  const bool gathers = op == ExchangeOp::kGatherHeads;
  const int64_t tokens = gathers ? sum_before(rank_tokens.data(), member.world_size) : rank_tokens[member.rank];
  LTX_CHECK(x.size(1) == tokens,
            must(op, name(0),
                 "have " + std::to_string(tokens) + " tokens in dimension 1 (rank " + std::to_string(member.rank) +
                     " of set_rank_tokens(" + list_of(rank_tokens) + "))",
                 std::to_string(x.size(1))));
  ExchangeCall call{.op = op,
                    .rank = member.rank,
                    .world_size = member.world_size,
                    .rank_tokens = rank_tokens,
                    .rank_heads = heads_of_ranks(op, member, name(0), x.size(2)),
                    .batch = x.size(0),
                    .heads = x.size(2),
                    .head_dim = x.size(3),
                    .dtype = member.dtype,
                    .num_tensors = static_cast<int>(tensors.size())};
  if (gathers) call.heads = total_heads(call.division());
  for (size_t i = 1; i < tensors.size(); ++i) {
    check_shape(op_name, name(i), tensors[i], {x.size(0), x.size(1), x.size(2), x.size(3)});
  }
  for (size_t i = 0; i < tensors.size(); ++i) check_last_contiguous(op_name, name(i), tensors[i]);

  int64_t elements = 0;
  for (int rank = 0; rank < member.world_size; ++rank) {
    const std::array<int64_t, 4> sizes = result_sizes(call, rank);
    elements = std::max(elements, product({sizes[0], sizes[1], sizes[2], sizes[3]}));
  }
  const int64_t results = op == ExchangeOp::kAllgather ? member.world_size : 1;
  LTX_CHECK(elements <= product({member.max_elements, results}),
            must(op, name(0),
                 "give each rank a result of at most " + std::to_string(product({member.max_elements, results})) +
                     " elements (" + (results > 1 ? "world_size * " : "") + "seqlen * hidden_dim)",
                 std::to_string(elements) +
                     ": needs seqlen * hidden_dim >= " + std::to_string((elements - 1) / results + 1)));
  return call;
}

void check_apart(const ExchangeCall& call, const std::vector<TensorView>& tensors, const std::byte* slot,
                 int64_t slot_bytes) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto* data = static_cast<const std::byte*>(tensors[i].data);
    LTX_CHECK(tensors[i].num_elements() == 0 || data < slot || data >= slot + slot_bytes,
              must(call.op, name_at(i, tensors.size()), "not lie in the buffer that this call writes to",
                   "a view of an earlier result (copy_out=True gives a copy)"));
  }
}

Block block_between(const ExchangeCall& call, int sender, int receiver) {
  switch (call.op) {
    case ExchangeOp::kSendRecvHeads:
    case ExchangeOp::kSendRecvQkv:
      return send_recv_heads_block(call.division(), sender, receiver);
    case ExchangeOp::kGatherHeads:
      return gather_heads_block(call.division(), sender, receiver);
    case ExchangeOp::kAllgather:
      return allgather_block(call.division(), call.heads, sender);
  }
  LTX_UNREACHABLE("unknown exchange");
}

std::array<int64_t, 4> result_sizes(const ExchangeCall& call, int rank) {
  const Block block = block_between(call, rank, rank);
  return {call.batch, block.target_tokens, block.target_heads, call.head_dim};
}

int64_t result_bytes(const ExchangeCall& call, int rank) {
  const std::array<int64_t, 4> sizes = result_sizes(call, rank);
  return sizes[0] * sizes[1] * sizes[2] * sizes[3] * size_of(call.dtype);
}

int64_t slot_bytes_needed(const ExchangeCall& call) {
  int64_t bytes = 0;
  for (int rank = 0; rank < call.world_size; ++rank)
    bytes = std::max(bytes, tensor_offset(call, rank, call.num_tensors));
  return bytes;
}

uint64_t hash_of(const ExchangeCall& call) {
  uint64_t hash = hash_word(kHashBasis, static_cast<uint64_t>(call.op));
  hash = hash_word(hash, static_cast<uint64_t>(call.dtype));
  for (const int64_t size : {call.batch, call.heads, call.head_dim}) hash = hash_word(hash, size);
  for (const int64_t tokens : call.rank_tokens) hash = hash_word(hash, tokens);
  for (const int64_t heads : call.rank_heads) hash = hash_word(hash, heads);
  return hash;
}

std::string message_of(const Status& status, double timeout_seconds) {
  const std::string op = name_of(static_cast<ExchangeOp>(status.op));
  const std::string rank = std::to_string(status.rank);
  const std::string peers = names_of(status.peers);
  const bool one = __builtin_popcount(status.peers) == 1;
  const std::string call = "call " + std::to_string(status.epoch);
  if (status.kind == Status::Kind::kMismatch) {
    return op + ": ranks " + rank + (one ? " and " : ", ") + peers +
           " must agree on op, rank_tokens, shape, heads and dtype, got others (" + call + ")";
  }
  return op + ": rank " + rank + " waited in vain for " + (one ? "rank " : "ranks ") + peers + " (" +
         (status.epoch == 0 ? "" : call + ", ") + "timeout " + number_to_string(timeout_seconds) + " s)";
}

}  // namespace ltx
