#pragma once

// All that a binding needs of torch: the stable ABI and names from it; tensor -> view; allocation; and the call of the
// backend that serves a device, on the current stream.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <type_traits>

#include "common/built.h"
#include "common/check.h"
#include "common/stream.h"
#include "common/tensor.h"

namespace ltx {

using torch::stable::Tensor;

TensorView view(const Tensor& tensor);
TensorView mutable_view(const Tensor& tensor);  // of an output, or of an argument that the op writes to
std::optional<TensorView> view(const std::optional<Tensor>& tensor);
DType dtype_of(torch::headeronly::ScalarType dtype);

// Uninitialized and contiguous, on `device`.
Tensor empty(const int64_t* sizes, int rank, DType dtype, const Device& device);
inline Tensor empty(std::initializer_list<int64_t> sizes, DType dtype, const Device& device) {
  return empty(sizes.begin(), static_cast<int>(sizes.size()), dtype, device);
}
inline Tensor empty_like(const TensorView& like, DType dtype) {
  return empty(like.sizes.data(), like.rank, dtype, like.device);
}
// Contiguous, over memory that lives as long as `keep`.
Tensor borrow(void* data, const int64_t* sizes, int rank, DType dtype, const Device& device,
              std::shared_ptr<const void> keep);
// Uninitialized scales of all rows and blocks of `x`, laid out as blockwise/quantize_block.h says.
Tensor empty_scales(const TensorView& x);
// Another shape over the same memory.
Tensor as_strided(const Tensor& tensor, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides);

// Makes a CUDA device current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// The stream that torch uses on `device` at this moment.
Stream current_stream(int device);

// Throws if `op` cannot run on `device`: "<op>: <name> must be on cpu (...), got cuda:0", or what the device lacks.
// `has_cuda`: this build has CUDA code for the op. Called after the op's own checks and before it allocates.
void check_backend(const char* op, const char* name, const Device& device, bool has_cuda);

// Gives OpenMP torch.set_num_threads's count in a thread in which torch has computed nothing yet.
void set_num_threads();

// Runs the backend of `device` with `params`: kCpu(params), or kCuda(params, stream) under a device guard. kCuda is
// nullptr for an op without CUDA code, which check_backend has refused elsewhere than on a CPU.
//
// A quantizing op has a second form, <op>_outputs, whose binding stops short of this (kFills false): it checks the
// arguments and allocates the results, on any device, for Triton's kernels to fill.
template <auto kCpu, auto kCuda, class Params>
void run(const Params& params, const Device& device) {
  if (device.kind == Device::Kind::kCpu) {
    set_num_threads();
    kCpu(params);
  } else if constexpr (kBuiltCuda && !std::is_null_pointer_v<decltype(kCuda)>) {
    const DeviceGuard guard(device.index);
    kCuda(params, current_stream(device.index));
  } else {
    LTX_UNREACHABLE("no code for " + to_string(device));
  }
}

}  // namespace ltx
