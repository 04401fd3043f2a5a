#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "all2all/division.h"
#include "all2all/workspace.h"
#include "common/tensor.h"

// One call of a communicator as all transports see it: its inputs checked, what goes where, and the hash by which ranks
// find out that they disagree.
namespace ltx {

// What the ranks of a communicator have agreed on, as one of them sees it.
struct Member {
  int rank;
  int world_size;
  DType dtype;
  int64_t max_elements;                            // of one result; of allgather's world_size times as many
  std::optional<std::vector<int64_t>> rank_heads;  // heads of each rank; none: as many for each, by the tensor's own
  std::optional<std::vector<int64_t>> rank_tokens = std::nullopt;
};

struct ExchangeCall {
  ExchangeOp op;
  int rank;
  int world_size;
  std::vector<int64_t> rank_tokens;
  std::vector<int64_t> rank_heads;  // empty for allgather
  int64_t batch;
  int64_t heads;  // all of them
  int64_t head_dim;
  DType dtype;
  int num_tensors;  // 3 for q, k and v, else 1

  Division division() const {
    return {.world_size = world_size, .rank_tokens = rank_tokens.data(), .rank_heads = rank_heads.data()};
  }
};

// Checks one tensor, or q, k and v, on the kind of device that a transport ("shm") takes, in this order:
// set_rank_tokens, device, dtype, rank, shape, strides, size of the result.
ExchangeCall make_call(ExchangeOp op, const Member& member, const std::vector<TensorView>& tensors,
                       std::optional<Device::Kind> device_kind, const char* transport);

// Throws if a tensor lies in the slot that the call writes to: a view of an earlier result that is no longer valid, or
// in the same slot as a replayed graph gives. What the call sends would be overwritten while it is read.
void check_apart(const ExchangeCall& call, const std::vector<TensorView>& tensors, const std::byte* slot,
                 int64_t slot_bytes);

// What `sender` sends to `receiver`.
Block block_between(const ExchangeCall& call, int sender, int receiver);

// Of one of the results on a rank, and where in its slot result number `tensor` begins.
std::array<int64_t, 4> result_sizes(const ExchangeCall& call, int rank);
int64_t result_bytes(const ExchangeCall& call, int rank);
inline int64_t tensor_offset(const ExchangeCall& call, int rank, int tensor) {
  return tensor * aligned_bytes(result_bytes(call, rank));
}
// What a slot must hold for this call, whichever rank's it is.
int64_t slot_bytes_needed(const ExchangeCall& call);

// Of op, counts, sizes and dtype: equal on two ranks if they agree.
uint64_t hash_of(const ExchangeCall& call);

// Why a communicator is dead.
struct ExchangeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// "send_recv_heads: rank 0 waited in vain for ranks 2 and 3 (call 7, timeout 10 s)"
std::string message_of(const Status& status, double timeout_seconds);

}  // namespace ltx
