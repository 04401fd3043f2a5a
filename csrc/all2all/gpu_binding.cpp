#include "all2all/exchange_binding.h"
#include "all2all/gpu_communicator.h"
#include "all2all/ipc_workspaces.h"
#include "all2all/registry.h"
#include "common/device.h"

// Ranks on GPUs, of one process and of several. These ops are the package's own: no public call reaches them.
namespace ltx {
namespace {

constexpr const char* kOpen = "All2All";

void share_gpus(const std::vector<int64_t>& ids, const std::vector<int64_t>& devices, int64_t num_sms) {
  LTX_CHECK(kBuiltCuda, "All2All: this build has no CUDA code");
  if constexpr (kBuiltCuda) {
    std::vector<int> indices;
    for (const int64_t device : devices) {
      const std::string& lacks = cuda_device_lacks(static_cast<int>(device));
      LTX_CHECK(lacks.empty(), "All2All: cuda:" + std::to_string(device) + " cannot be used: " + lacks);
      indices.push_back(static_cast<int>(device));
    }
    std::shared_ptr<GpuWorkspaces> workspaces;
    for (const int64_t id : ids) {
      const auto communicator = find_communicator(kOpen, id);
      const Member& member = communicator->member;
      const int64_t result_bytes = member.max_elements * size_of(member.dtype);
      if (!workspaces) workspaces = std::make_shared<GpuWorkspaces>(indices, result_bytes);
      communicator->gpu =
          std::make_shared<GpuCommunicator>(workspaces, member.rank, static_cast<int>(num_sms), result_bytes);
    }
  }
}

// One call of the ranks `ids`, in rank order, with `tensors` of the first, of the second, and so on; results alike.
std::vector<Tensor> exchange_on_gpus(const std::vector<Tensor>& tensors, int64_t op_number,
                                     const std::vector<int64_t>& ids, bool copy_out) {
  std::vector<Tensor> all;
  if constexpr (kBuiltCuda) {
    const auto op = static_cast<ExchangeOp>(op_number);
    const size_t each = tensors.size() / ids.size();
    std::vector<std::shared_ptr<Communicator>> communicators;
    std::vector<std::unique_lock<std::mutex>> locks;
    std::vector<GpuRun> runs;
    for (size_t i = 0; i < ids.size(); ++i) {
      communicators.push_back(find_communicator(name_of(op), ids[i]));
      Communicator& communicator = *communicators.back();
      locks.emplace_back(communicator.calls);
      LTX_CHECK(communicator.gpu != nullptr, std::string(name_of(op)) + ": this communicator has no GPU");
      std::vector<TensorView> inputs;
      for (size_t j = 0; j < each; ++j) inputs.push_back(view(tensors[i * each + j]));
      const Device device = communicator.gpu->device();
      const ExchangeCall call = make_call(op, communicator.member, inputs, Device::Kind::kCuda, "ipc");
      check_device(name_of(op), "x", inputs[0], device, "its rank");
      runs.push_back({.communicator = *communicator.gpu,
                      .call = call,
                      .tensors = inputs,
                      .outs = {},
                      .stream = current_stream(device.index)});
    }
    for (GpuRun& run : runs) {
      const std::array<int64_t, 4> sizes = result_sizes(run.call, run.call.rank);
      for (int j = 0; copy_out && j < run.call.num_tensors; ++j) {
        all.push_back(empty(sizes.data(), 4, run.call.dtype, run.communicator.device()));
        run.outs.push_back(static_cast<std::byte*>(all.back().mutable_data_ptr()));
      }
    }
    const std::vector<std::vector<GpuResult>> results = GpuRun::all(runs);
    for (size_t i = 0; !copy_out && i < runs.size(); ++i) {
      const std::array<int64_t, 4> sizes = result_sizes(runs[i].call, runs[i].call.rank);
      for (const GpuResult& result : results[i]) {
        all.push_back(
            borrow(result.data, sizes.data(), 4, runs[i].call.dtype, runs[i].communicator.device(), result.memory));
      }
    }
  }
  return all;
}

std::string create_board(int64_t id) {
  const auto communicator = find_communicator(kOpen, id);
  communicator->board = IpcBoard::create(communicator->member.rank, communicator->member.world_size);
  return communicator->board->name();
}

void open_board(int64_t id, const std::string& name) {
  const auto communicator = find_communicator(kOpen, id);
  communicator->board = IpcBoard::open(name, communicator->member.rank, communicator->member.world_size);
}

// Of all ranks, whose processes have the board.
void share_gpu(int64_t id, int64_t device, int64_t num_sms, bool allgather, double timeout_seconds) {
  const auto communicator = find_communicator(kOpen, id);
  const Member& member = communicator->member;
  communicator->board->unlink();  // all have it
  try {
    if constexpr (kBuiltCuda) {
      const int64_t result_bytes = aligned_bytes(member.max_elements * size_of(member.dtype));
      auto workspaces =
          std::make_shared<IpcWorkspaces>(communicator->board, member.rank, member.world_size, static_cast<int>(device),
                                          result_bytes * (allgather ? member.world_size : 1), timeout_seconds);
      std::shared_ptr<GpuCommunicator> gpu;
      communicator->board->round(timeout_seconds, [&](IpcPost&) {
        gpu = std::make_shared<GpuCommunicator>(workspaces, member.rank, static_cast<int>(num_sms), result_bytes);
      });
      communicator->gpu = std::move(gpu);
    } else {
      communicator->board->round(timeout_seconds,
                                 [](IpcPost&) { throw std::runtime_error("this build has no CUDA code"); });
    }
  } catch (const IpcAbsence& absence) {
    communicator->set_up = absence.status;
    throw ExchangeError(message_of(absence.status, timeout_seconds));
  }
}

void part_gpu(int64_t id) {
  if constexpr (kBuiltCuda) {
    const auto communicator = find_communicator("destroy", id);
    const std::lock_guard lock(communicator->calls);
    communicator->gpu->part();
    communicator->gpu->check();
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("all2all_share_gpus(int[] communicators, int[] devices, int num_sms) -> ()");
  m.def("all2all_exchange_on_gpus(Tensor[] tensors, int op, int[] communicators, bool copy_out) -> Tensor[]");
  m.def("all2all_create_board(int communicator) -> str");
  m.def("all2all_open_board(int communicator, str name) -> ()");
  m.def("all2all_share_gpu(int communicator, int device, int num_sms, bool allgather, float timeout_seconds) -> ()");
  m.def("all2all_part_gpu(int communicator) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CompositeExplicitAutograd, m) {
  m.impl("all2all_share_gpus", TORCH_BOX(&share_gpus));
  m.impl("all2all_exchange_on_gpus", TORCH_BOX(&exchange_on_gpus));
  m.impl("all2all_create_board", TORCH_BOX(&create_board));
  m.impl("all2all_open_board", TORCH_BOX(&open_board));
  m.impl("all2all_share_gpu", TORCH_BOX(&share_gpu));
  m.impl("all2all_part_gpu", TORCH_BOX(&part_gpu));
}

}  // namespace
}  // namespace ltx
