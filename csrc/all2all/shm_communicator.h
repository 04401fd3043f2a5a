#pragma once

#include <memory>
#include <string>
#include <vector>

#include "all2all/exchange.h"
#include "all2all/shared_memory.h"
#include "all2all/workspace.h"

// One rank's end of the protocol on CPUs: each rank is a process or a thread, and all map one SharedMemory that holds
// the workspaces of all ranks. A call blocks until its result is there. Calls of one rank come one after the other.
namespace ltx {

// A workspace begins on its own page.
int64_t shm_workspace_bytes(const Layout& layout);

class ShmCommunicator {
 public:
  // `memory` has world_size workspaces, and zeros where no rank has written yet.
  ShmCommunicator(std::shared_ptr<SharedMemory> memory, int rank, int world_size, const Layout& layout);

  // Has memory for all calls that the layout allows, which a call otherwise does when it first needs more.
  void reserve_all();

  // 0: waits for ever.
  void set_timeout(double seconds) { timeout_seconds_ = seconds; }

  // Throws if the inputs of the next call lie where it writes to.
  void check_inputs(const ExchangeCall& call, const std::vector<TensorView>& tensors) const;

  // Results: where they lie in this rank's slot, until its next call, of which they may be the input. Given `outs`,
  // contiguous tensors of the results' sizes, they are copied there instead. Throws ExchangeError if a peer does not
  // arrive in time or disagrees; the communicator is dead then, and every later call throws.
  std::vector<std::byte*> run(const ExchangeCall& call, const std::vector<TensorView>& tensors,
                              const std::vector<std::byte*>& outs);

  // Throws what the last call threw if the communicator is dead.
  void check() const;

  Status status() const;
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }

 private:
  std::byte* workspace(int rank) const;
  Control& control(int rank) const;
  std::byte* slot(int rank, int slot) const;

  void grow(int64_t slot_bytes);
  void push(const ExchangeCall& call, const std::vector<TensorView>& tensors, uint64_t epoch, int slot_idx);
  void tell_consumed(uint64_t epoch);
  void wait(const ExchangeCall& call, uint64_t epoch, int slot_idx);
  [[noreturn]] void fail(Status::Kind kind, const ExchangeCall& call, uint64_t epoch, uint32_t peers);
  template <class Ready>
  uint32_t poll(uint32_t peers, const Ready& ready);
  uint32_t missing_of(uint32_t absent) const;

  std::shared_ptr<SharedMemory> memory_;
  int rank_;
  int world_size_;
  Layout layout_;
  uint32_t peers_;  // bit p: rank p is a peer
  double timeout_seconds_ = 10;
  double deadline_ = 0;  // of the call
  std::string death_;
};

}  // namespace ltx
