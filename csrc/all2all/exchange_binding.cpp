#include "all2all/exchange_binding.h"
#include "all2all/gpu_communicator.h"
#include "all2all/registry.h"

namespace ltx {
namespace {

constexpr const char* kOpen = "All2All";

std::vector<TensorView> views(const std::vector<Tensor>& tensors) {
  std::vector<TensorView> all;
  all.reserve(tensors.size());
  for (const Tensor& tensor : tensors) all.push_back(view(tensor));
  return all;
}

void check_result_size(const char* op, const char* name, int64_t expected, int64_t value) {
  LTX_CHECK(value == expected, std::string(op) + ": " + name + " must be " + std::to_string(expected) +
                                   ", the size of the result, got " + std::to_string(value));
}

ShmCommunicator& shm_of(const char* op, Communicator& communicator) {
  LTX_CHECK(communicator.shm != nullptr, std::string(op) + ": this communicator has no shared memory");
  return *communicator.shm;
}

int64_t open_communicator(int64_t rank, int64_t world_size, int64_t max_elements, torch::headeronly::ScalarType dtype,
                          const std::optional<std::vector<int64_t>>& rank_heads) {
  auto communicator = std::make_shared<Communicator>();
  communicator->member = {.rank = static_cast<int>(rank),
                          .world_size = static_cast<int>(world_size),
                          .dtype = dtype_of(dtype),
                          .max_elements = max_elements,
                          .rank_heads = rank_heads};
  return add_communicator(std::move(communicator));
}

Layout layout_of(const Member& member) {
  return make_layout(member.world_size, member.max_elements * size_of(member.dtype));  // All2All bounds both
}

void attach(Communicator& communicator, std::shared_ptr<SharedMemory> memory) {
  const Member& member = communicator.member;
  communicator.shm =
      std::make_unique<ShmCommunicator>(std::move(memory), member.rank, member.world_size, layout_of(member));
}

int64_t memory_bytes(const Member& member) { return shm_workspace_bytes(layout_of(member)) * member.world_size; }

std::string create_memory(int64_t id) {
  const auto communicator = find_communicator(kOpen, id);
  attach(*communicator, SharedMemory::create(memory_bytes(communicator->member)));
  return communicator->shm->memory()->name();
}

void open_memory(int64_t id, const std::string& name) {
  const auto communicator = find_communicator(kOpen, id);
  attach(*communicator, SharedMemory::open(name, memory_bytes(communicator->member)));
}

void share_memory(const std::vector<int64_t>& ids) {
  std::shared_ptr<SharedMemory> memory;
  for (const int64_t id : ids) {
    const auto communicator = find_communicator(kOpen, id);
    if (!memory) memory = SharedMemory::of_this_process(memory_bytes(communicator->member));
    attach(*communicator, memory);
  }
}

void unlink_memory(int64_t id) {
  const auto communicator = find_communicator(kOpen, id);
  shm_of(kOpen, *communicator).memory()->unlink();
}

void release_memory(int64_t id) {
  const auto communicator = find_communicator(kOpen, id);
  communicator->shm.reset();
  communicator->board.reset();
}

void reserve_allgather(int64_t id) {
  const auto communicator = find_communicator(kOpen, id);
  shm_of(kOpen, *communicator).reserve_all();
}

void set_rank_tokens(int64_t id, const std::vector<int64_t>& tokens) {
  const auto communicator = find_communicator("set_rank_tokens", id);
  const std::lock_guard lock(communicator->calls);
  communicator->member.rank_tokens = tokens;
}

void set_timeout(int64_t id, double seconds) {
  const auto communicator = find_communicator("set_timeout_seconds", id);
  const std::lock_guard lock(communicator->calls);
  if (communicator->shm) communicator->shm->set_timeout(seconds);
  if constexpr (kBuiltCuda) {
    if (communicator->gpu) communicator->gpu->set_timeout(seconds);
  }
}

int64_t status(int64_t id) {
  std::shared_ptr<Communicator> communicator;
  try {
    communicator = find_communicator("check", id);
  } catch (const std::runtime_error&) {
    return 0;  // asked after an error, which is this one
  }
  const std::lock_guard lock(communicator->calls);
  Status found = communicator->shm ? communicator->shm->status() : communicator->set_up;
  if constexpr (kBuiltCuda) {
    if (communicator->gpu) found = communicator->gpu->status();
  }
  return static_cast<int64_t>(pack(found));
}

void check(int64_t id) {
  const auto communicator = find_communicator("check", id);
  const std::lock_guard lock(communicator->calls);  // waits for a call of another thread
  if (communicator->shm) communicator->shm->check();
  if constexpr (kBuiltCuda) {
    if (!communicator->gpu) return;
    communicator->gpu->synchronize();
    communicator->gpu->check();
  }
}

void close_communicator(int64_t id) { remove_communicator(id); }

std::vector<int64_t> check_call(const std::vector<Tensor>& tensors, int64_t op, int64_t id) {
  const auto exchange_op = static_cast<ExchangeOp>(op);
  const auto communicator = find_communicator(name_of(exchange_op), id);
  const std::lock_guard lock(communicator->calls);
  const std::vector<TensorView> inputs = views(tensors);
  const ExchangeCall call = make_call(exchange_op, communicator->member, inputs, std::nullopt, "nccl");
  if (communicator->shm) communicator->shm->check_inputs(call, inputs);
  const std::array<int64_t, 4> sizes = result_sizes(call, call.rank);
  return {sizes.begin(), sizes.end()};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("all2all_open(int rank, int world_size, int max_elements, ScalarType dtype, int[]? rank_heads) -> int");
  m.def("all2all_create_memory(int communicator) -> str");
  m.def("all2all_open_memory(int communicator, str name) -> ()");
  m.def("all2all_share_memory(int[] communicators) -> ()");
  m.def("all2all_unlink_memory(int communicator) -> ()");
  m.def("all2all_release_memory(int communicator) -> ()");
  m.def("all2all_reserve_allgather(int communicator) -> ()");
  m.def("all2all_set_rank_tokens(int communicator, int[] tokens) -> ()");
  m.def("all2all_set_timeout(int communicator, float seconds) -> ()");
  m.def("all2all_status(int communicator) -> int");
  m.def("all2all_check(int communicator) -> ()");
  m.def("all2all_check_call(Tensor[] tensors, int op, int communicator) -> int[]");
  m.def("all2all_close(int communicator) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CompositeExplicitAutograd, m) {
  m.impl("all2all_open", TORCH_BOX(&open_communicator));
  m.impl("all2all_create_memory", TORCH_BOX(&create_memory));
  m.impl("all2all_open_memory", TORCH_BOX(&open_memory));
  m.impl("all2all_share_memory", TORCH_BOX(&share_memory));
  m.impl("all2all_unlink_memory", TORCH_BOX(&unlink_memory));
  m.impl("all2all_release_memory", TORCH_BOX(&release_memory));
  m.impl("all2all_reserve_allgather", TORCH_BOX(&reserve_allgather));
  m.impl("all2all_set_rank_tokens", TORCH_BOX(&set_rank_tokens));
  m.impl("all2all_set_timeout", TORCH_BOX(&set_timeout));
  m.impl("all2all_status", TORCH_BOX(&status));
  m.impl("all2all_check", TORCH_BOX(&check));
  m.impl("all2all_check_call", TORCH_BOX(&check_call));
  m.impl("all2all_close", TORCH_BOX(&close_communicator));
}

}  // namespace

std::vector<Tensor> exchange(ExchangeOp op, const std::vector<Tensor>& tensors, const Tensor& state,
                             int64_t communicator_id, int64_t out_tokens, int64_t out_heads, bool copy_out) {
  const char* op_name = name_of(op);
  const auto communicator = find_communicator(op_name, communicator_id);
  const std::lock_guard lock(communicator->calls);
  ShmCommunicator& shm = shm_of(op_name, *communicator);
  shm.check();
  const std::vector<TensorView> inputs = views(tensors);
  const ExchangeCall call = make_call(op, communicator->member, inputs, Device::Kind::kCpu, "shm");
  const std::array<int64_t, 4> sizes = result_sizes(call, call.rank);
  check_result_size(op_name, "out_tokens", sizes[1], out_tokens);
  check_result_size(op_name, "out_heads", sizes[2], out_heads);
  const TensorView counter = mutable_view(state);
  check_device(op_name, "state", counter, {}, op == ExchangeOp::kSendRecvQkv ? "q" : "x");
  check_dtype(op_name, "state", counter, {DType::kInt64});
  check_shape(op_name, "state", counter, {1});

  std::vector<Tensor> results;
  std::vector<std::byte*> outs;
  for (int i = 0; copy_out && i < call.num_tensors; ++i) {
    results.push_back(empty(sizes.data(), 4, call.dtype, {}));
    outs.push_back(static_cast<std::byte*>(results.back().mutable_data_ptr()));
  }
  set_num_threads();
  const std::vector<std::byte*> where = shm.run(call, inputs, outs);
  for (int i = 0; !copy_out && i < call.num_tensors; ++i) {
    results.push_back(borrow(where[i], sizes.data(), 4, call.dtype, {}, shm.memory()));
  }
  ++*static_cast<int64_t*>(counter.data);
  return results;
}

}  // namespace ltx
