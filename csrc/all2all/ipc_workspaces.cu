#include <cuda_runtime.h>

#include <cstring>

#include "all2all/ipc_workspaces.h"
#include "common/cuda/launch.h"

namespace ltx {
namespace {

constexpr const char* kOpen = "All2All";
// cudaMalloc puts smaller allocations into blocks of this size, and a handle opens the whole block.
constexpr int64_t kBlockBytes = int64_t{2} << 20;

// At least one.
int64_t whole_blocks(int64_t bytes) { return (bytes / kBlockBytes + 1) * kBlockBytes; }

DeviceUuid uuid_of(int device) {
  cudaDeviceProp properties;
  LTX_CUDA_CHECK(cudaGetDeviceProperties(&properties, device), kOpen);
  DeviceUuid uuid;
  static_assert(sizeof(properties.uuid) == sizeof(uuid));
  std::memcpy(uuid.data(), &properties.uuid, sizeof(uuid));
  return uuid;
}

// As far as this process can see: a peer's GPU that is hidden from it may yet be open to it.
bool lacks_access(int device, const DeviceUuid& peer) {
  int num_devices = 0;
  LTX_CUDA_CHECK(cudaGetDeviceCount(&num_devices), kOpen);
  for (int other = 0; other < num_devices; ++other) {
    if (other == device || uuid_of(other) != peer) continue;
    int can = 0;
    LTX_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device, other), kOpen);
    return can == 0;
  }
  return false;
}

}  // namespace

IpcWorkspaces::IpcWorkspaces(std::shared_ptr<IpcBoard> board, std::shared_ptr<IpcExports> exports, int rank,
                             int world_size, int device)
    : GpuWorkspaces(std::vector<int>(world_size, device), exports),
      board_(std::move(board)),
      exports_(std::move(exports)),
      rank_(rank) {}

IpcWorkspaces::IpcWorkspaces(const std::shared_ptr<IpcBoard>& board, int rank, int world_size, int device,
                             int64_t slot_bytes, double timeout_seconds)
    : IpcWorkspaces(board, std::make_shared<IpcExports>(board), rank, world_size, device) {
  const std::vector<IpcPost> devices = board_->round(timeout_seconds, [&](IpcPost& post) {
    const std::string& lacks = cuda_device_lacks(device);
    LTX_CHECK(lacks.empty(), "cuda:" + std::to_string(device) + " cannot be used: " + lacks);
    post.device = uuid_of(device);
  });
  check_ipc_access(board_->round(timeout_seconds, [&](IpcPost& post) {
    post.device = devices[rank].device;
    for (int peer = 0; peer < world_size; ++peer) {
      if (lacks_access(device, devices[peer].device)) post.no_access |= 1U << peer;
    }
  }));
  controls_ = share(sizeof(Control), timeout_seconds);
  board_->round(timeout_seconds, [&](IpcPost&) { clear_control(rank_); });
  grow(slot_bytes, timeout_seconds);
}

void IpcWorkspaces::begin_call(uint64_t hash, int64_t slot_bytes, double timeout_seconds) {
  board_->begin_call(hash);
  if (slot_bytes > capacity_bytes()) grow(slot_bytes, timeout_seconds);
}

void IpcWorkspaces::grow(int64_t slot_bytes, double timeout_seconds) {
  replace_slots(share(kNumSlots * slot_bytes, timeout_seconds), slot_bytes);
}

// New memory of all ranks.
std::vector<std::shared_ptr<GpuMemory>> IpcWorkspaces::share(int64_t bytes, double timeout_seconds) {
  std::vector<std::shared_ptr<GpuMemory>> memory(world_size());
  std::shared_ptr<GpuMemory>& own = memory[rank_];
  std::vector<IpcPost> posts;
  try {
    posts = board_->round(timeout_seconds, [&](IpcPost& post) {
      own = std::make_shared<GpuMemory>(device(rank_), whole_blocks(bytes));
      post.memory = own->handle();
    });
  } catch (const IpcAbsence&) {
    exports_->add(own);  // an absent peer may come after all, and open it; after an error none does
    throw;
  }
  exports_->add(own);
  board_->round(timeout_seconds, [&](IpcPost&) {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank_) memory[peer] = std::make_shared<GpuMemory>(device(rank_), posts[peer].memory);
    }
  });
  return memory;
}

}  // namespace ltx
