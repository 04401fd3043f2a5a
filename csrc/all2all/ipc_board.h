#pragma once

#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "all2all/shared_memory.h"
#include "all2all/workspace.h"

// How ranks that are processes of one machine come to map each other's GPU memory: what the host does, without a GPU.
//
// A board is a small file that all ranks map. Each rank posts what the others must know, and waits until they have, in
// rounds; so they set up, and so they grow. Each rank holds a lock on the file for as long as it may map memory of a
// peer. What a rank has let its peers map outlives the rank's own use of it until none of them holds a lock.
namespace ltx {

using IpcHandle = std::array<std::byte, 64>;  // a cudaIpcMemHandle_t
using DeviceUuid = std::array<uint8_t, 16>;

// What a rank tells the others in a round.
struct IpcPost {
  DeviceUuid device;
  uint32_t no_access;  // bit p: its GPU has no access to the memory of rank p's
  IpcHandle memory;
  uint64_t hash;                // of the call that grows, which round() fills in; 0: set-up
  std::array<char, 512> error;  // what kept the rank from its part; empty: nothing
};

// Peers that did not come to a round in time (kTimeout), or came to another call (kMismatch).
struct IpcAbsence : std::runtime_error {
  explicit IpcAbsence(const Status& found) : std::runtime_error("All2All: peers are absent"), status(found) {}

  Status status;  // without an op
};

class IpcBoard {
 public:
  static std::shared_ptr<IpcBoard> create(int rank, int world_size);
  static std::shared_ptr<IpcBoard> open(const std::string& name, int rank, int world_size);

  const std::string& name() const { return memory_->name(); }
  void unlink() { memory_->unlink(); }

  // Says that this rank begins its next call. Peers that wait in a round of the one before learn so that it is past it.
  void begin_call(uint64_t hash);

  // Posts what `part` fills in, an error if it throws, and returns the posts of all ranks. The same on all ranks:
  // throws all errors, or IpcAbsence. A timeout of 0 waits for ever.
  std::vector<IpcPost> round(double timeout_seconds, const std::function<void(IpcPost&)>& part);

  // Whether a peer may still map memory of this rank.
  bool is_mapped() const;
  void let_go();

 private:
  struct Row {
    // The owner's calls so far, and the hash of the last one, which is stored before it is counted.
    uint64_t calls;
    uint64_t hash;
    // Of rounds that alternate: who posts in a round has read all posts of the last but one.
    std::array<uint64_t, 2> rounds;
    std::array<IpcPost, 2> posts;
  };

  IpcBoard(std::shared_ptr<SharedMemory> memory, int rank, int world_size);
  IpcAbsence absence(Status::Kind kind, uint32_t peers) const;
  Row& row(int rank) const { return reinterpret_cast<Row*>(memory_->data())[rank]; }

  std::shared_ptr<SharedMemory> memory_;
  int rank_;
  int world_size_;
  uint64_t round_ = 0;
  pid_t process_ = getpid();
};

// Throws if a rank has no access to another's memory, and names all such pairs.
void check_ipc_access(const std::vector<IpcPost>& posts);

// One rank's memory that peers may map. At its end the rank maps no more of theirs, and its own is freed once no peer
// holds its lock: at the next end or begin of an IpcExports of this process, since none waits.
class IpcExports {
 public:
  explicit IpcExports(std::shared_ptr<IpcBoard> board);
  IpcExports(const IpcExports&) = delete;
  IpcExports& operator=(const IpcExports&) = delete;
  ~IpcExports();

  void add(std::shared_ptr<const void> memory) { memory_.push_back(std::move(memory)); }

 private:
  std::shared_ptr<IpcBoard> board_;
  std::vector<std::shared_ptr<const void>> memory_;
};

}  // namespace ltx
