#include <string>

#include "common/device.h"
#include "torch/binding.h"

// What this build is and what it can run on, for get_backend() and `python -m ltx_kernels info`.
namespace ltx {
namespace {

std::string built_architectures() { return kBuiltArchitectures; }

std::string device_lacks(int64_t device) {
  if constexpr (kBuiltCuda) {
    return cuda_device_lacks(static_cast<int>(device));
  } else {
    return "this build has no CUDA code";
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("built_architectures() -> str");
  m.def("cuda_device_lacks(int device) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CompositeExplicitAutograd, m) {
  m.impl("built_architectures", TORCH_BOX(&built_architectures));
  m.impl("cuda_device_lacks", TORCH_BOX(&device_lacks));
}

}  // namespace
}  // namespace ltx
