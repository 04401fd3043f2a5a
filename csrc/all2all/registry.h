#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>

#include "all2all/exchange.h"
#include "all2all/ipc_board.h"
#include "all2all/shm_communicator.h"

// The communicators of this process, by a small number: what torch's ops and compiled graphs hold in place of a
// pointer.
namespace ltx {

class GpuCommunicator;

struct Communicator {
  Member member;
  std::unique_ptr<ShmCommunicator> shm = nullptr;  // of the transport shm
  std::shared_ptr<GpuCommunicator> gpu = nullptr;  // of ranks on GPUs
  std::shared_ptr<IpcBoard> board = nullptr;       // of the transport ipc
  Status set_up = {};                              // what kept ipc from it
  std::mutex calls;                                // one at a time
  pid_t process = getpid();                        // a fork of it has the memory too, and is no rank
};

int64_t add_communicator(std::shared_ptr<Communicator> communicator);
// Throws if it was destroyed, or made by a process of which this one is a fork.
std::shared_ptr<Communicator> find_communicator(const char* op, int64_t id);
void remove_communicator(int64_t id);

}  // namespace ltx
