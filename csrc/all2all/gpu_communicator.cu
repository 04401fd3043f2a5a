#include <cuda_runtime.h>

#include <algorithm>
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

GpuMemory::~GpuMemory() {
  const CurrentDevice current(device_);
  cudaFree(data_);  // waits for kernels that use it
}

GpuWorkspaces::GpuWorkspaces(std::vector<int> devices, int64_t result_bytes) : devices_(std::move(devices)) {
  check_peer_access(devices_);
  for (const int device : devices_) {
    const CurrentDevice current(device);
    controls_.push_back(std::make_shared<GpuMemory>(device, sizeof(Control)));
    LTX_CUDA_CHECK(cudaMemset(controls_.back()->data(), 0, sizeof(Control)), kOpen);
    LTX_CUDA_CHECK(cudaDeviceSynchronize(), kOpen);  // before a peer writes there
    load_exchange_kernels();
  }
  grow(aligned_bytes(result_bytes));
}

Control* GpuWorkspaces::control(int rank) const { return reinterpret_cast<Control*>(controls_[rank]->data()); }

std::byte* GpuWorkspaces::slot(int rank, int slot_idx) const { return slots_[rank]->data() + slot_idx * slot_bytes_; }

void GpuWorkspaces::grow(int64_t slot_bytes) {
  if (!slots_.empty() && slot_bytes <= slot_bytes_) return;
  std::vector<std::shared_ptr<GpuMemory>> grown;
  grown.reserve(devices_.size());
  for (const int device : devices_) grown.push_back(std::make_shared<GpuMemory>(device, kNumSlots * slot_bytes));
  outgrown_.insert(outgrown_.end(), slots_.begin(), slots_.end());
  slots_ = std::move(grown);
  slot_bytes_ = slot_bytes;
}

GpuCommunicator::GpuCommunicator(std::shared_ptr<GpuWorkspaces> workspaces, int rank, int num_sms, int64_t result_bytes)
    : workspaces_(std::move(workspaces)),
      rank_(rank),
      num_sms_(std::min(num_sms, cuda_num_sms(workspaces_->device(rank)))),
      result_bytes_(aligned_bytes(result_bytes)) {
  const CurrentDevice current(workspaces_->device(rank_));
  LTX_CUDA_CHECK(cudaHostAlloc(&death_, sizeof(uint64_t), cudaHostAllocPortable | cudaHostAllocMapped), kOpen);
  *death_ = 0;
}

GpuCommunicator::~GpuCommunicator() {
  const CurrentDevice current(workspaces_->device(rank_));
  cudaDeviceSynchronize();  // kernels use it, and the workspaces of ranks on other devices
  cudaFreeHost(death_);
}

Status GpuCommunicator::status() const { return unpack(__atomic_load_n(death_, __ATOMIC_ACQUIRE)); }

void GpuCommunicator::check() const {
  const Status found = status();
  if (found.kind != Status::Kind::kNone) throw ExchangeError(message_of(found, timeout_seconds_));
}

void GpuCommunicator::synchronize() const {
  const CurrentDevice current(workspaces_->device(rank_));
  LTX_CUDA_CHECK(cudaDeviceSynchronize(), "check");
}

GpuEnd GpuRun::end(int slot) const {
  const GpuWorkspaces& workspaces = *communicator.workspaces_;
  GpuEnd end{.rank = call.rank,
             .world_size = call.world_size,
             .slot = slot,
             .op = call.op,
             .hash = hash_of(call),
             .timeout = static_cast<uint64_t>(std::min(communicator.timeout_seconds_, 1e9) * 1e9),
             .death = communicator.death_,
             .workspace = {}};
  for (int rank = 0; rank < call.world_size; ++rank) end.workspace[rank] = workspaces.control(rank);
  return end;
}

// Memory is had for whole results, so that it grows at most once for q, k and v and once for allgather.
int64_t GpuRun::bytes_needed() const {
  const int results = call.op == ExchangeOp::kAllgather ? call.world_size : call.num_tensors;
  return communicator.result_bytes_ * results;
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
  const std::string op = name_of(runs[0].call.op);
  bool copy_out = false;
  for (const GpuRun& run : runs) {
    run.communicator.check();
    copy_out = copy_out || !run.outs.empty();
    if (run.bytes_needed() <= run.communicator.workspaces_->capacity_bytes()) continue;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    LTX_CUDA_CHECK(cudaStreamIsCapturing(run.stream, &capture), op);
    LTX_CHECK(capture == cudaStreamCaptureStatusNone,
              op + ": must have been called once before it is captured into a graph, for its memory");
    run.communicator.workspaces_->grow(run.bytes_needed());
  }
  for (const GpuRun& run : runs) {
    const GpuCommunicator& end = run.communicator;
    check_apart(run.call, run.tensors, end.workspaces_->slot(end.rank_, end.slot_), end.workspaces_->capacity_bytes());
  }
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
