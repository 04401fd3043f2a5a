#pragma once

#include <memory>
#include <vector>

#include "all2all/gpu_communicator.h"
#include "all2all/ipc_board.h"

// The workspaces of ranks that are processes of one machine, as one of them sees them: its own memory, and that of its
// peers, which it has opened by CUDA IPC. Ranks may share a GPU. A process need not see the GPUs of others, nor under
// the same number: they are told apart by their UUIDs.
namespace ltx {

class IpcWorkspaces final : public GpuWorkspaces {
 public:
  // Of all ranks together. What keeps it from one of them is thrown on all; absent peers are an IpcAbsence.
  IpcWorkspaces(const std::shared_ptr<IpcBoard>& board, int rank, int world_size, int device, int64_t slot_bytes,
                double timeout_seconds);

  void begin_call(uint64_t hash, int64_t slot_bytes, double timeout_seconds) override;

 private:
  IpcWorkspaces(std::shared_ptr<IpcBoard> board, std::shared_ptr<IpcExports> exports, int rank, int world_size,
                int device);
  std::vector<std::shared_ptr<GpuMemory>> share(int64_t bytes, double timeout_seconds);
  void grow(int64_t slot_bytes, double timeout_seconds);

  std::shared_ptr<IpcBoard> board_;
  std::shared_ptr<IpcExports> exports_;
  int rank_;
};

}  // namespace ltx
