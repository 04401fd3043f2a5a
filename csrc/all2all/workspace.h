#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

// The memory through which ranks exchange tensors, for host and device. Each rank owns one workspace and maps those of
// its peers:
//
//   Control | slot 0 | slot 1          a slot holds what peers store for one call, in its final layout
//
// Calls of a communicator are numbered from 1: their epoch. A call uses one slot; the host alternates them. It is
//   begin   if the last call used this slot too (a replayed graph): tell every peer that its result is consumed
//   push    wait until a peer has consumed the last call that used the slot, store into its slot, post the arrival
//   wait    tell every peer that the last result is consumed, not before, since the push may have read it as its input;
//           wait until every peer's arrival of this call is here; a result that is copied out is consumed at once
// all2all/exchange.pml is the model of it, which spin checks.
namespace ltx {

inline constexpr int kMaxRanks = 8;
inline constexpr int kNumSlots = 2;
inline constexpr int64_t kSlotAlignment = 256;
inline constexpr int kQkvTensors = 3;
inline constexpr int64_t kMaxResultBytes = int64_t{1} << 56;  // so that no size below exceeds 64 bits

// Written by a peer into this rank's memory when its data for a call are there.
struct Arrival {
  uint64_t epoch;
  uint64_t hash;  // of all that ranks must agree on; stored before the epoch, which is released
};

struct alignas(128) FromPeer {  // cache lines of its own: peers write at the same time
  uint64_t consumed;            // the last of this rank's calls whose result the peer has consumed
  std::array<Arrival, kNumSlots> arrived;
};

struct Control {
  // The owner's alone.
  uint64_t epoch;                           // of its last call
  std::array<uint64_t, kNumSlots> last_of;  // the last call that used each slot
  uint64_t status;                          // a packed Status, 0: none
  uint64_t began;                           // when its last call began, on the clock of its GPU
  std::array<uint32_t, kMaxRanks> pushed;   // blocks of a kernel that are done with a peer; 0 again after the last
  // Written by the owner, read by peers.
  alignas(128) uint64_t capacity_bytes;  // what peers may store in a slot; it only grows
  // Written by peer p at index p.
  std::array<FromPeer, kMaxRanks> from;
};
static_assert(sizeof(FromPeer) == 128 && sizeof(Control) == 256 + kMaxRanks * 128);

constexpr int64_t aligned_bytes(int64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// Where the parts of a workspace lie. result_bytes: of the largest result of send_recv_heads or gather_heads. A slot
// has room for three of them (q, k and v in one call) or for all ranks' tensors (allgather); memory for more than one
// is only had once a call needs it.
struct Layout {
  int64_t result_bytes;
  int64_t slot_bytes;

  constexpr int64_t slot_offset(int slot) const { return static_cast<int64_t>(sizeof(Control)) + slot * slot_bytes; }
  constexpr int64_t total_bytes() const { return slot_offset(kNumSlots); }
};

constexpr Layout make_layout(int world_size, int64_t result_bytes) {
  const int64_t aligned = aligned_bytes(result_bytes);
  return {.result_bytes = aligned, .slot_bytes = aligned * std::max(world_size, kQkvTensors)};
}

// Why a communicator is dead. One word, so that a kernel writes it with one store.
struct Status {
  enum class Kind : uint8_t { kNone, kTimeout, kMismatch };
  Kind kind = Kind::kNone;
  uint8_t op = 0;      // an ExchangeOp
  uint8_t rank = 0;    // that writes it
  uint8_t peers = 0;   // bit p: peer p did not arrive, or disagrees
  uint32_t epoch = 0;  // the low half of it

  bool operator==(const Status&) const = default;
};

constexpr uint64_t pack(const Status& status) {
  return static_cast<uint64_t>(status.kind) | uint64_t{status.op} << 8 | uint64_t{status.rank} << 16 |
         uint64_t{status.peers} << 24 | uint64_t{status.epoch} << 32;
}

constexpr Status unpack(uint64_t word) {
  return {.kind = static_cast<Status::Kind>(word & 0xFF),
          .op = static_cast<uint8_t>(word >> 8),
          .rank = static_cast<uint8_t>(word >> 16),
          .peers = static_cast<uint8_t>(word >> 24),
          .epoch = static_cast<uint32_t>(word >> 32)};
}

// FNV-1a over the bytes of words, the lowest first.
inline constexpr uint64_t kHashBasis = 0xCBF29CE484222325;
inline constexpr uint64_t kHashPrime = 0x100000001B3;

constexpr uint64_t hash_bytes(uint64_t hash, uint64_t word, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) hash = (hash ^ (word >> (8 * i) & 0xFF)) * kHashPrime;
  return hash;
}

constexpr uint64_t hash_word(uint64_t hash, uint64_t word) { return hash_bytes(hash, word, 8); }

}  // namespace ltx
