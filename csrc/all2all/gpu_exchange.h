#pragma once

#include <array>
#include <cstdint>

#include "all2all/push_plan.h"
#include "all2all/workspace.h"
#include "common/stream.h"

// begin, push and wait of workspace.h as kernels. No kernel waits for one that its own rank launches later, and only
// push and wait wait at all: for what peers tell and post. Epochs lie in device memory and are never reset, so that a
// captured graph can be replayed; the slot is an argument, which a replay keeps.
namespace ltx {

// A rank's words in host memory, which its kernels reach: for a host that does not wait for them.
struct HostWords {
  uint64_t death;    // control.status
  uint64_t parting;  // not 0: the host is about to destroy the communicator, and a wait without a timeout gets one
};

// One rank's end of a call, as its kernels see it.
struct GpuEnd {
  int rank;
  int world_size;
  int slot;
  ExchangeOp op;
  uint64_t hash;
  uint64_t timeout;  // in nanoseconds; 0: none
  HostWords* host;
  std::array<Control*, kMaxRanks> workspace;  // of every rank, its own too
};

struct PushArgs {
  GpuEnd end;
  int num_tensors;
  std::array<Share, kMaxRanks> shares;
  std::array<std::array<BlockCopy, kQkvTensors>, kMaxRanks> copies;  // by peer; the last to the rank's own slot
};

// Several ranks of one device in one launch.
struct GpuEnds {
  int count;
  std::array<GpuEnd, kMaxRanks> ends;
};

void launch_begin(const GpuEnds& ends, Stream stream);
void launch_push(const PushArgs& args, int num_blocks, int vector_bytes, Stream stream);
void launch_wait(const GpuEnds& ends, Stream stream);
void launch_consumed(const GpuEnds& ends, Stream stream);  // after a result is copied out

// Loads the kernels on the current device: to load one later might have to wait for one that waits.
void load_exchange_kernels();

}  // namespace ltx
