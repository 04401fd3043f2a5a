#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "all2all/gpu_communicator.h"
#include "all2all/gpu_exchange.h"
#include "common/cuda/launch.h"

namespace ltx {
namespace {

constexpr const char* kOpen = "All2All";

// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);  // of one that cannot be, the next call tells
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

void check_peer_access(const std::vector<int>& devices) {
  for (const int from : devices) {
    for (const int to : devices) {
      if (from == to) continue;
      int can = 0;
      LTX_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, from, to), kOpen);
      LTX_CHECK(can != 0, "All2All: devices must have access to each other's memory, got cuda:" + std::to_string(from) +
                              " without access to cuda:" + std::to_string(to));
    }
  }
  for (const int from : devices) {
    const CurrentDevice current(from);
    for (const int to : devices) {
      if (from == to) continue;
      const cudaError_t enabled = cudaDeviceEnablePeerAccess(to, 0);
      if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();  // must not be found by a later launch
      } else {
        LTX_CUDA_CHECK(enabled, kOpen);
      }
    }
  }
}

}  // namespace

GpuMemory::GpuMemory(int device, int64_t bytes) : device_(device) {
  const CurrentDevice current(device_);
  const cudaError_t allocated = cudaMalloc(&data_, std::max<int64_t>(bytes, kSlotAlignment));
  cudaGetLastError();  // must not be found by a later launch
  LTX_CHECK(allocated == cudaSuccess, "All2All: needs " + std::to_string(bytes) + " bytes on cuda:" +
                                          std::to_string(device) + ": " + cudaGetErrorString(allocated));
}

GpuMemory::GpuMemory(int device, const IpcHandle& handle) : device_(device), opened_(true) {
  const CurrentDevice current(device_);
  cudaIpcMemHandle_t cuda_handle;
  static_assert(sizeof(cuda_handle) == sizeof(handle));
  std::memcpy(&cuda_handle, handle.data(), sizeof(cuda_handle));
  const cudaError_t opened =
      cudaIpcOpenMemHandle(reinterpret_cast<void**>(&data_), cuda_handle, cudaIpcMemLazyEnablePeerAccess);
  cudaGetLastError();  // must not be found by a later launch
  LTX_CHECK(opened == cudaSuccess,
            std::string("All2All: cannot open another process's GPU memory: ") + cudaGetErrorString(opened));
}

GpuMemory::~GpuMemory() {
  const CurrentDevice current(device_);
  if (opened_) {
    cudaIpcCloseMemHandle(data_);
  } else {
    cudaFree(data_);  // waits for kernels that use it
  }
}

IpcHandle GpuMemory::handle() const {
  cudaIpcMemHandle_t cuda_handle;
  LTX_CUDA_CHECK(cudaIpcGetMemHandle(&cuda_handle, data_), kOpen);
  IpcHandle handle;
  std::memcpy(handle.data(), &cuda_handle, sizeof(cuda_handle));
  return handle;
}

GpuWorkspaces::GpuWorkspaces(std::vector<int> devices, std::shared_ptr<const void> last)
    : last_(std::move(last)), devices_(std::move(devices)) {}

GpuWorkspaces::GpuWorkspaces(std::vector<int> devices, int64_t result_bytes)
    : GpuWorkspaces(std::move(devices), nullptr) {
  check_peer_access(devices_);
  for (int rank = 0; rank < world_size(); ++rank) {
    controls_.push_back(std::make_shared<GpuMemory>(device(rank), sizeof(Control)));
    clear_control(rank);
  }
  begin_call(0, aligned_bytes(result_bytes), 0);
}

void GpuWorkspaces::clear_control(int rank) const {
  const CurrentDevice current(device(rank));
  LTX_CUDA_CHECK(cudaMemset(control(rank), 0, sizeof(Control)), kOpen);
  LTX_CUDA_CHECK(cudaDeviceSynchronize(), kOpen);  // before a peer writes there
  load_exchange_kernels();
}

Control* GpuWorkspaces::control(int rank) const { return reinterpret_cast<Control*>(controls_[rank]->data()); }

std::byte* GpuWorkspaces::slot(int rank, int slot_idx) const { return slots_[rank]->data() + slot_idx * slot_bytes_; }

void GpuWorkspaces::begin_call(uint64_t /*hash*/, int64_t slot_bytes, double /*timeout_seconds*/) {
  if (!slots_.empty() && slot_bytes <= slot_bytes_) return;
  std::vector<std::shared_ptr<GpuMemory>> grown;
  grown.reserve(devices_.size());
  for (const int device : devices_) grown.push_back(std::make_shared<GpuMemory>(device, kNumSlots * slot_bytes));
  replace_slots(std::move(grown), slot_bytes);
}

void GpuWorkspaces::replace_slots(std::vector<std::shared_ptr<GpuMemory>> slots, int64_t slot_bytes) {
  outgrown_.insert(outgrown_.end(), slots_.begin(), slots_.end());
  slots_ = std::move(slots);
  slot_bytes_ = slot_bytes;
}

GpuCommunicator::GpuCommunicator(std::shared_ptr<GpuWorkspaces> workspaces, int rank, int num_sms, int64_t result_bytes)
    : workspaces_(std::move(workspaces)),
      rank_(rank),
      num_sms_(std::min(num_sms, cuda_num_sms(workspaces_->device(rank)))),
      result_bytes_(aligned_bytes(result_bytes)) {
  const CurrentDevice current(workspaces_->device(rank_));
  LTX_CUDA_CHECK(cudaHostAlloc(&host_, sizeof(HostWords), cudaHostAllocPortable | cudaHostAllocMapped), kOpen);
  *host_ = {};
}

GpuCommunicator::~GpuCommunicator() {
  part();  // kernels use the words, and the workspaces of ranks on other devices
  const CurrentDevice current(workspaces_->device(rank_));
  cudaFreeHost(host_);
}

Status GpuCommunicator::status() const { return unpack(__atomic_load_n(&host_->death, __ATOMIC_ACQUIRE)); }

void GpuCommunicator::check() const {
  const Status found = status();
  if (found.kind != Status::Kind::kNone) throw ExchangeError(message_of(found, timeout_seconds_));
}

void GpuCommunicator::synchronize() const {
  const CurrentDevice current(workspaces_->device(rank_));
  LTX_CUDA_CHECK(cudaDeviceSynchronize(), "check");
}

void GpuCommunicator::part() const {
  __atomic_store_n(&host_->parting, 1, __ATOMIC_RELEASE);
  const CurrentDevice current(workspaces_->device(rank_));
  cudaDeviceSynchronize();
}

GpuEnd GpuRun::end(int slot) const {
  const GpuWorkspaces& workspaces = *communicator.workspaces_;
  GpuEnd end{.rank = call.rank,
             .world_size = call.world_size,
             .slot = slot,
             .op = call.op,
             .hash = hash_of(call),
             .timeout = static_cast<uint64_t>(std::min(communicator.timeout_seconds_, 1e9) * 1e9),
             .host = communicator.host_,
             .workspace = {}};
  for (int rank = 0; rank < call.world_size; ++rank) end.workspace[rank] = workspaces.control(rank);
  return end;
}

// Memory is had for whole results, so that it grows at most once for q, k and v and once for allgather.
int64_t GpuRun::bytes_needed() const {
  const int results = call.op == ExchangeOp::kAllgather ? call.world_size * call.num_tensors : call.num_tensors;
  return communicator.result_bytes_ * results;
}

// What this rank can find wrong by itself, before peers learn of its call.
void GpuRun::check() const {
  communicator.check();
  const GpuWorkspaces& workspaces = *communicator.workspaces_;
  const std::string op = name_of(call.op);
  if (bytes_needed() <= workspaces.capacity_bytes()) {
    check_apart(call, tensors, workspaces.slot(call.rank, communicator.slot_), workspaces.capacity_bytes());
    return;
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  LTX_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture), op);
  LTX_CHECK(capture == cudaStreamCaptureStatusNone,
            op + ": must have been called once before it is captured into a graph, for its memory");
}

void GpuRun::begin_call() const {
  try {
    communicator.workspaces_->begin_call(hash_of(call), bytes_needed(), communicator.timeout_seconds_);
  } catch (const IpcAbsence& absence) {
    Status status = absence.status;
    if (status.kind == Status::Kind::kMismatch) {
      // As if there were no tensors: the arrivals tell the peers that this is another call, and the wait finds that of
      // the peers' arrivals.
      GpuRun without = *this;
      without.call.num_tensors = 0;
      without.tensors.clear();
      without.outs.clear();
      all({without});
      communicator.synchronize();
    } else {
      status.op = static_cast<uint8_t>(call.op);
      __atomic_store_n(&communicator.host_->death, pack(status), __ATOMIC_RELEASE);
    }
    communicator.check();
    throw;
  }
}

void GpuRun::push(int slot) const {
  PushArgs args{.end = end(slot), .num_tensors = call.num_tensors, .shares = {}, .copies = {}};
  std::vector<BlockCopy> copies;
  std::vector<int64_t> peer_bytes(call.world_size);
  for (int peer = 0; peer < call.world_size; ++peer) {
    const Block block = block_between(call, call.rank, peer);
    for (int i = 0; i < call.num_tensors; ++i) {
      std::byte* target = communicator.workspaces_->slot(peer, slot) + tensor_offset(call, peer, i);
      args.copies[peer][i] = make_block_copy(call, block, tensors[i], target);
      copies.push_back(args.copies[peer][i]);
      peer_bytes[peer] += copies.back().bytes();
    }
  }
  const std::vector<Share> shares = divide_blocks(peer_bytes, communicator.num_sms_);
  std::copy(shares.begin(), shares.end(), args.shares.begin());
  int num_blocks = 0;
  for (const Share& share : shares) num_blocks = std::max(num_blocks, share.first + share.count);
  launch_push(args, num_blocks, vector_bytes_of(copies), stream);
}

std::vector<GpuResult> GpuRun::results(int slot) const {
  std::vector<GpuResult> all;
  for (int i = 0; i < call.num_tensors; ++i) {
    std::byte* data = communicator.workspaces_->slot(call.rank, slot) + tensor_offset(call, call.rank, i);
    if (outs.empty()) {
      all.push_back({.data = data, .memory = communicator.workspaces_->slots(call.rank)});
      continue;
    }
    LTX_CUDA_CHECK(cudaMemcpyAsync(outs[i], data, result_bytes(call, call.rank), cudaMemcpyDeviceToDevice, stream),
                   name_of(call.op));
    all.push_back({.data = outs[i], .memory = nullptr});
  }
  return all;
}

std::vector<std::vector<GpuResult>> GpuRun::all(const std::vector<GpuRun>& runs) {
  for (const GpuRun& run : runs) run.check();
  for (const GpuRun& run : runs) run.begin_call();
  bool copy_out = false;
  for (const GpuRun& run : runs) copy_out = copy_out || !run.outs.empty();
  std::vector<int> slots;
  std::map<int, GpuEnds> of_devices;
  std::map<int, Stream> streams;
  for (const GpuRun& run : runs) {
    slots.push_back(run.communicator.slot_);
    run.communicator.slot_ = (run.communicator.slot_ + 1) % kNumSlots;
    GpuEnds& ends = of_devices[run.communicator.device().index];
    ends.ends[ends.count++] = run.end(slots.back());
    streams[run.communicator.device().index] = run.stream;
  }
  const auto each_device = [&](void (*launch)(const GpuEnds&, Stream)) {
    for (const auto& [device, ends] : of_devices) {
      const CurrentDevice current(device);
      launch(ends, streams[device]);
    }
  };

  each_device(launch_begin);
  for (size_t i = 0; i < runs.size(); ++i) {
    const CurrentDevice current(runs[i].communicator.device().index);
    runs[i].push(slots[i]);
  }
  each_device(launch_wait);
  std::vector<std::vector<GpuResult>> results;
  for (size_t i = 0; i < runs.size(); ++i) {
    const CurrentDevice current(runs[i].communicator.device().index);
    results.push_back(runs[i].results(slots[i]));
  }
  if (copy_out) each_device(launch_consumed);
  return results;
}

}  // namespace ltx
