#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "all2all/shm_communicator.h"
#include "common/parallel_for.h"

namespace ltx {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr double kGraceSeconds = 0.2;

double now_seconds() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

uint64_t load_acquire(uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }
void store_release(uint64_t& word, uint64_t value) { std::atomic_ref(word).store(value, std::memory_order_release); }

int slot_of(uint64_t epoch) { return static_cast<int>(epoch % kNumSlots); }

// Waits a little longer each time, up to a millisecond: peers may need this core, and a peer may be slower by seconds.
class Patience {
 public:
  void wait() {
    ++rounds_;
    if (rounds_ < 100) return;
    if (rounds_ < 2000) {
      sched_yield();
    } else {
      const timespec pause{.tv_sec = 0, .tv_nsec = std::min((rounds_ - 1900) * 500L, 1'000'000L)};
      nanosleep(&pause, nullptr);
    }
  }

 private:
  int64_t rounds_ = 0;
};

void copy_bytes(std::byte* target, const std::byte* source, int64_t bytes) {
  constexpr int64_t kPartBytes = 1 << 16;
  parallel_for((bytes + kPartBytes - 1) / kPartBytes, bytes / 2, [&](int64_t begin, int64_t end) {
    std::memcpy(target + begin * kPartBytes, source + begin * kPartBytes,
                std::min(end * kPartBytes, bytes) - begin * kPartBytes);
  });
}

// `target`: where the receiver's result begins.
void copy_block(const ExchangeCall& call, const Block& block, const TensorView& x, std::byte* target) {
  const int64_t element_bytes = size_of(x.dtype);
  const int64_t head_bytes = call.head_dim * element_bytes;
  const int64_t elements = call.batch * block.tokens * block.heads * call.head_dim;
  if (elements == 0) return;
  const bool heads_adjoin = block.heads == 1 || x.stride(2) == call.head_dim;
  const auto* source = static_cast<const std::byte*>(x.data);
  parallel_for(call.batch * block.tokens, elements, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t batch_idx = row / block.tokens;
      const int64_t token = row % block.tokens;
      const std::byte* from = source + (batch_idx * x.stride(0) + (block.source_token + token) * x.stride(1) +
                                        block.source_head * x.stride(2)) *
                                           element_bytes;
      std::byte* to = target + ((batch_idx * block.target_tokens + block.target_token + token) * block.target_heads +
                                block.target_head) *
                                   head_bytes;
      if (heads_adjoin) {
        std::memcpy(to, from, block.heads * head_bytes);
        continue;
      }
      for (int64_t head = 0; head < block.heads; ++head) {
        std::memcpy(to + head * head_bytes, from + head * x.stride(2) * element_bytes, head_bytes);
      }
    }
  });
}

}  // namespace

int64_t shm_workspace_bytes(const Layout& layout) {
  return (layout.total_bytes() + kPageBytes - 1) / kPageBytes * kPageBytes;
}

ShmCommunicator::ShmCommunicator(std::shared_ptr<SharedMemory> memory, int rank, int world_size, const Layout& layout)
    : memory_(std::move(memory)),
      rank_(rank),
      world_size_(world_size),
      layout_(layout),
      peers_(((1U << world_size) - 1) & ~(1U << rank)) {
  memory_->reserve(rank_ * shm_workspace_bytes(layout_), sizeof(Control));
  grow(layout_.result_bytes);
}

void ShmCommunicator::reserve_all() { grow(layout_.slot_bytes); }

std::byte* ShmCommunicator::workspace(int rank) const { return memory_->data() + rank * shm_workspace_bytes(layout_); }

Control& ShmCommunicator::control(int rank) const { return *reinterpret_cast<Control*>(workspace(rank)); }

std::byte* ShmCommunicator::slot(int rank, int slot) const { return workspace(rank) + layout_.slot_offset(slot); }

Status ShmCommunicator::status() const { return unpack(control(rank_).status); }

void ShmCommunicator::check() const {
  if (control(rank_).status != 0) throw ExchangeError(death_);
}

void ShmCommunicator::check_inputs(const ExchangeCall& call, const std::vector<TensorView>& tensors) const {
  check_apart(call, tensors, slot(rank_, slot_of(control(rank_).epoch + 1)), layout_.slot_bytes);
}

void ShmCommunicator::grow(int64_t slot_bytes) {
  Control& own = control(rank_);
  if (static_cast<int64_t>(own.capacity_bytes) >= slot_bytes) return;
  for (int slot_idx = 0; slot_idx < kNumSlots; ++slot_idx) {
    memory_->reserve(rank_ * shm_workspace_bytes(layout_) + layout_.slot_offset(slot_idx), slot_bytes);
  }
  store_release(own.capacity_bytes, slot_bytes);  // by the owner; a peer that reads it may store into these pages
}

// The peers of `peers` for which ready(p) does not come true in time. Once one of them is dead, the others have
// kGraceSeconds.
template <class Ready>
uint32_t ShmCommunicator::poll(uint32_t peers, const Ready& ready) {
  Patience patience;
  while (peers != 0) {
    bool moved = false;
    bool dead = false;
    const double now = now_seconds();
    for (int peer = 0; peer < world_size_; ++peer) {
      if ((peers >> peer & 1) == 0) continue;
      const bool peer_is_dead = load_acquire(control(peer).status) != 0;  // acquires what it has posted before
      if (ready(peer)) {
        peers &= ~(1U << peer);
        moved = true;
      } else {
        dead = dead || peer_is_dead;
      }
    }
    if (dead) deadline_ = std::min(deadline_, now + kGraceSeconds);
    if (moved) {
      patience = {};
    } else if (now > deadline_) {
      break;
    } else {
      patience.wait();
    }
  }
  return peers;
}

// Without the peers that did not arrive because they wait in vain for others of them.
uint32_t ShmCommunicator::missing_of(uint32_t absent) const {
  uint32_t missing = absent;
  for (int peer = 0; peer < world_size_; ++peer) {
    const uint32_t bit = 1U << peer;
    if ((absent & bit) == 0) continue;
    const Status status = unpack(load_acquire(control(peer).status));
    if (status.kind == Status::Kind::kTimeout && (status.peers & absent & ~bit) != 0) missing &= ~bit;
  }
  return missing != 0 ? missing : absent;
}

std::vector<std::byte*> ShmCommunicator::run(const ExchangeCall& call, const std::vector<TensorView>& tensors,
                                             const std::vector<std::byte*>& outs) {
  check();
  check_inputs(call, tensors);
  const int64_t needed = slot_bytes_needed(call);
  grow(needed);
  deadline_ = timeout_seconds_ == 0 ? std::numeric_limits<double>::infinity() : now_seconds() + timeout_seconds_;
  const uint64_t epoch = ++control(rank_).epoch;
  const int slot_idx = slot_of(epoch);

  push(call, tensors, epoch, slot_idx);  // the slots alternate: nothing to begin with
  wait(call, epoch, slot_idx);

  std::vector<std::byte*> results(tensors.size());
  for (int i = 0; i < call.num_tensors; ++i) results[i] = slot(rank_, slot_idx) + tensor_offset(call, rank_, i);
  if (outs.empty()) return results;
  for (int i = 0; i < call.num_tensors; ++i) copy_bytes(outs[i], results[i], result_bytes(call, rank_));
  tell_consumed(epoch);
  return outs;
}

void ShmCommunicator::push(const ExchangeCall& call, const std::vector<TensorView>& tensors, uint64_t epoch,
                           int slot_idx) {
  Control& own = control(rank_);
  const uint64_t hash = hash_of(call);
  const int64_t needed = slot_bytes_needed(call);
  const auto store_to = [&](int peer) {
    for (int i = 0; i < call.num_tensors; ++i) {
      copy_block(call, block_between(call, rank_, peer), tensors[i],
                 slot(peer, slot_idx) + tensor_offset(call, peer, i));
    }
  };
  uint32_t refused = 0;
  const uint32_t absent = poll(peers_, [&](int peer) {
    // Acquires what the peer has said in tell_consumed: its reads of this slot come before the stores below.
    if (load_acquire(own.from[peer].consumed) < own.last_of[slot_idx]) return false;
    Arrival& posted = control(peer).from[rank_].arrived[slot_idx];
    Arrival& arrival = own.from[peer].arrived[slot_idx];
    // A peer that is in another call does not make room for this one: its arrival says so, and so must this rank's.
    const bool disagrees = load_acquire(arrival.epoch) >= epoch && arrival.hash != hash;  // acquires the hash
    // Acquires the peer's growth: its pages are there.
    if (!disagrees && static_cast<int64_t>(load_acquire(control(peer).capacity_bytes)) < needed) return false;
    if (disagrees) {
      refused |= 1U << peer;
    } else {
      store_to(peer);
    }
    posted.hash = hash;
    store_release(posted.epoch, epoch);  // orders the stores above before the peer's reads of them
    return true;
  });
  if (refused != 0) fail(Status::Kind::kMismatch, call, epoch, refused);
  if (absent != 0) fail(Status::Kind::kTimeout, call, epoch, missing_of(absent));
  store_to(rank_);
  own.last_of[slot_idx] = epoch;
}

void ShmCommunicator::tell_consumed(uint64_t epoch) {
  for (int peer = 0; peer < world_size_; ++peer) {
    // Orders this rank's reads of its results before the peer's next stores there.
    if (peer != rank_) store_release(control(peer).from[rank_].consumed, epoch);
  }
}

void ShmCommunicator::wait(const ExchangeCall& call, uint64_t epoch, int slot_idx) {
  tell_consumed(epoch - 1);
  const uint64_t hash = hash_of(call);
  uint32_t disagree = 0;
  const uint32_t absent = poll(peers_, [&](int peer) {
    Arrival& arrival = control(rank_).from[peer].arrived[slot_idx];
    if (load_acquire(arrival.epoch) < epoch) return false;  // acquires the peer's stores into this rank's slot
    if (arrival.hash != hash) disagree |= 1U << peer;
    return true;
  });
  if (disagree != 0) fail(Status::Kind::kMismatch, call, epoch, disagree);
  if (absent != 0) fail(Status::Kind::kTimeout, call, epoch, missing_of(absent));
}

void ShmCommunicator::fail(Status::Kind kind, const ExchangeCall& call, uint64_t epoch, uint32_t peers) {
  const Status status{.kind = kind,
                      .op = static_cast<uint8_t>(call.op),
                      .rank = static_cast<uint8_t>(rank_),
                      .peers = static_cast<uint8_t>(peers),
                      .epoch = static_cast<uint32_t>(epoch)};
  store_release(control(rank_).status, pack(status));  // orders all that was posted before a peer's look at it
  death_ = message_of(status, timeout_seconds_);
  throw ExchangeError(death_);
}

}  // namespace ltx
