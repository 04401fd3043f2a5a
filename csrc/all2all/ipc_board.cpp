#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <mutex>
#include <utility>

#include "all2all/ipc_board.h"
#include "common/check.h"

namespace ltx {
namespace {

uint64_t load_acquire(uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }
void store_release(uint64_t& word, uint64_t value) { std::atomic_ref(word).store(value, std::memory_order_release); }

std::string name_of(const DeviceUuid& device) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "GPU-";
  for (size_t i = 0; i < device.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    name += {kDigits[device[i] >> 4], kDigits[device[i] & 15]};
  }
  return name;
}

// Memory of ranks that have ended, which peers may map.
struct Remains {
  std::shared_ptr<IpcBoard> board;
  std::vector<std::shared_ptr<const void>> memory;
};
struct AllRemains {
  std::mutex mutex;
  std::vector<Remains> list;
};

AllRemains& all_remains() {
  static auto* instance = new AllRemains;  // at the end of the process the driver frees all
  return *instance;
}

void free_remains() {
  std::vector<Remains> freed;  // after the lock: to free memory of a GPU takes time
  AllRemains& all = all_remains();
  const std::lock_guard lock(all.mutex);
  const auto first = std::partition(all.list.begin(), all.list.end(),
                                    [](const Remains& remains) { return remains.board->is_mapped(); });
  std::move(first, all.list.end(), std::back_inserter(freed));
  all.list.erase(first, all.list.end());
}

}  // namespace

std::shared_ptr<IpcBoard> IpcBoard::create(int rank, int world_size) {
  const int64_t bytes = static_cast<int64_t>(sizeof(Row)) * world_size;
  auto memory = SharedMemory::create(bytes);
  memory->reserve(0, bytes);
  return std::shared_ptr<IpcBoard>(new IpcBoard(std::move(memory), rank, world_size));
}

std::shared_ptr<IpcBoard> IpcBoard::open(const std::string& name, int rank, int world_size) {
  auto memory = SharedMemory::open(name, static_cast<int64_t>(sizeof(Row)) * world_size);
  return std::shared_ptr<IpcBoard>(new IpcBoard(std::move(memory), rank, world_size));
}

IpcBoard::IpcBoard(std::shared_ptr<SharedMemory> memory, int rank, int world_size)
    : memory_(std::move(memory)), rank_(rank), world_size_(world_size) {
  memory_->lock(rank_);  // before a peer's first post, as all open the board before one of them posts
}

void IpcBoard::let_go() {
  if (process_ == getpid()) memory_->unlock(rank_);  // a fork has the lock too, and maps nothing
}

IpcAbsence IpcBoard::absence(Status::Kind kind, uint32_t peers) const {
  return IpcAbsence({.kind = kind,
                     .rank = static_cast<uint8_t>(rank_),
                     .peers = static_cast<uint8_t>(peers),
                     .epoch = static_cast<uint32_t>(row(rank_).calls)});
}

void IpcBoard::begin_call(uint64_t hash) {
  Row& own = row(rank_);
  store_release(own.hash, hash);            // orders this rank's posts before it, for who finds another hash
  store_release(own.calls, own.calls + 1);  // and the hash before the count
}

std::vector<IpcPost> IpcBoard::round(double timeout_seconds, const std::function<void(IpcPost&)>& part) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  Row& own = row(rank_);
  const size_t place = ++round_ % own.posts.size();
  IpcPost& post = own.posts[place];
  post = {};
  post.hash = own.hash;
  try {
    part(post);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::copy_n(text.begin(), std::min(text.size(), post.error.size() - 1), post.error.begin());
  }
  store_release(own.rounds[place], round_);  // orders the post before a peer's read of it

  uint32_t missing = ((1U << world_size_) - 1) & ~(1U << rank_);
  for (;;) {
    uint32_t elsewhere = 0;
    const bool late =
        timeout_seconds > 0 && std::chrono::duration<double>(Clock::now() - begin).count() > timeout_seconds;
    for (int peer = 0; peer < world_size_; ++peer) {
      const uint32_t bit = 1U << peer;
      if ((missing & bit) == 0) continue;
      Row& theirs = row(peer);
      // Acquires the posts before: a peer that has left this call after its post in this round has arrived below.
      const uint64_t calls = load_acquire(theirs.calls);
      const bool other_call = calls > own.calls || (calls == own.calls && load_acquire(theirs.hash) != own.hash);
      const bool arrived = load_acquire(theirs.rounds[place]) == round_;  // acquires the post
      if (!arrived && !other_call) continue;
      missing &= ~bit;
      if (!arrived || theirs.posts[place].hash != post.hash) elsewhere |= bit;
    }
    if (elsewhere != 0) throw absence(Status::Kind::kMismatch, elsewhere);
    if (missing == 0) break;
    if (late) throw absence(Status::Kind::kTimeout, missing);
    const timespec pause{.tv_sec = 0, .tv_nsec = 50000};
    nanosleep(&pause, nullptr);
  }

  std::vector<IpcPost> posts;
  std::string errors;
  for (int rank = 0; rank < world_size_; ++rank) {
    posts.push_back(row(rank).posts[place]);
    if (posts.back().error[0] == '\0') continue;
    errors += (errors.empty() ? "All2All: rank " : "; rank ") + std::to_string(rank) + ": " + posts.back().error.data();
  }
  LTX_CHECK(errors.empty(), errors);
  return posts;
}

bool IpcBoard::is_mapped() const {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_ && memory_->is_locked_elsewhere(peer)) return true;
  }
  return false;
}

void check_ipc_access(const std::vector<IpcPost>& posts) {
  std::string pairs;
  for (size_t from = 0; from < posts.size(); ++from) {
    for (size_t to = 0; to < posts.size(); ++to) {
      if ((posts[from].no_access >> to & 1) == 0) continue;
      pairs += (pairs.empty() ? "rank " : ", rank ") + std::to_string(from) + " (" + name_of(posts[from].device) +
               ") without access to rank " + std::to_string(to) + " (" + name_of(posts[to].device) + ")";
    }
  }
  LTX_CHECK(pairs.empty(), "All2All: GPUs must have access to each other's memory, got " + pairs);
}

IpcExports::IpcExports(std::shared_ptr<IpcBoard> board) : board_(std::move(board)) { free_remains(); }

IpcExports::~IpcExports() {
  board_->let_go();
  {
    AllRemains& all = all_remains();
    const std::lock_guard lock(all.mutex);
    all.list.push_back({.board = std::move(board_), .memory = std::move(memory_)});
  }
  free_remains();
}

}  // namespace ltx
