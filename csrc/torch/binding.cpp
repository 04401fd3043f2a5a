#include <dlfcn.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <utility>

#include "blockwise/quantize_block.h"
#include "common/device.h"
#include "torch/binding.h"

namespace ltx {

namespace {

struct TorchDType {
  int32_t torch;
  DType dtype;
};

// Torch's numbers are only to be had at run time.
const std::array<TorchDType, 12>& dtypes() {
  static const std::array<TorchDType, 12> table = {{
      {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
      {aoti_torch_dtype_float16(), DType::kFloat16},
      {aoti_torch_dtype_float32(), DType::kFloat32},
      {aoti_torch_dtype_float8_e4m3fn(), DType::kFp8},
      {aoti_torch_dtype_uint8(), DType::kUint8},
      {aoti_torch_dtype_float64(), DType::kFloat64},
      {aoti_torch_dtype_float8_e5m2(), DType::kFp8E5m2},
      {aoti_torch_dtype_int8(), DType::kInt8},
      {aoti_torch_dtype_int16(), DType::kInt16},
      {aoti_torch_dtype_int32(), DType::kInt32},
      {aoti_torch_dtype_int64(), DType::kInt64},
      {aoti_torch_dtype_bool(), DType::kBool},
  }};
  return table;
}

DType from_torch(int32_t torch) {
  for (const TorchDType& entry : dtypes()) {
    if (entry.torch == torch) return entry.dtype;
  }
  return DType::kOther;
}

int32_t to_torch(DType dtype) {
  for (const TorchDType& entry : dtypes()) {
    if (entry.dtype == dtype) return entry.torch;
  }
  LTX_UNREACHABLE("no torch dtype for " + to_string(dtype));
}

Device device_of(AtenTensorHandle tensor) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  static const int32_t cuda = aoti_torch_device_type_cuda();
  int32_t type = 0;
  int32_t index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &index));
  if (type == cpu) return {Device::Kind::kCpu, 0};
  return {type == cuda ? Device::Kind::kCuda : Device::Kind::kOther, index};
}

TensorView view_without_data(AtenTensorHandle tensor) {
  TensorView view;
  int32_t dtype = 0;
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &rank));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  view.dtype = from_torch(dtype);
  view.device = device_of(tensor);
  view.rank = static_cast<int>(rank);
  const int64_t held = std::min<int64_t>(rank, kMaxRank);
  std::copy_n(sizes, held, view.sizes.begin());
  std::copy_n(strides, held, view.strides.begin());
  return view;
}

}  // namespace

TensorView view(const Tensor& tensor) {
  if (!tensor.defined()) return {.device = {Device::Kind::kNone, 0}};
  TensorView view = view_without_data(tensor.get());
  view.data = const_cast<void*>(tensor.const_data_ptr());  // backends write through outputs alone
  return view;
}

TensorView mutable_view(const Tensor& tensor) {
  if (!tensor.defined()) return view(tensor);
  TensorView view = view_without_data(tensor.get());
  view.data = tensor.mutable_data_ptr();
  return view;
}

std::optional<TensorView> view(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(view(*tensor)) : std::nullopt;
}

DType dtype_of(torch::headeronly::ScalarType dtype) {
  return from_torch(torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)));
}

namespace {

std::array<int64_t, kMaxRank> contiguous_strides(const int64_t* sizes, int rank) {
  std::array<int64_t, kMaxRank> strides = {};
  int64_t stride = 1;
  for (int dim = rank - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

int32_t to_torch(Device::Kind kind) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  static const int32_t cuda = aoti_torch_device_type_cuda();
  return kind == Device::Kind::kCpu ? cpu : cuda;
}

}  // namespace

Tensor empty(const int64_t* sizes, int rank, DType dtype, const Device& device) {
  const std::array<int64_t, kMaxRank> strides = contiguous_strides(sizes, rank);
  AtenTensorHandle tensor = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, sizes, strides.data(), to_torch(dtype), to_torch(device.kind),
                                                  device.index, &tensor));
  return Tensor(tensor);
}

Tensor borrow(void* data, const int64_t* sizes, int rank, DType dtype, const Device& device,
              std::shared_ptr<const void> keep) {
  const std::array<int64_t, kMaxRank> strides = contiguous_strides(sizes, rank);
  const auto release = [](void*, void* kept) { delete static_cast<std::shared_ptr<const void>*>(kept); };
  auto* kept = new std::shared_ptr<const void>(std::move(keep));
  const int32_t index = device.kind == Device::Kind::kCpu ? -1 : device.index;  // all that it takes for a CPU
  AtenTensorHandle tensor = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_from_blob(data, rank, sizes, strides.data(), 0, to_torch(dtype), to_torch(device.kind),
                                         index, &tensor, aoti_torch_layout_strided(), nullptr, 0, release, kept));
  return Tensor(tensor);
}

Tensor empty_scales(const TensorView& x) {
  const int64_t rows = x.num_rows();
  const int64_t blocks = num_blocks(x.size(-1));
  const int64_t padded = padded_rows(rows);
  return as_strided(empty({blocks, padded}, DType::kFloat32, x.device), {rows, blocks}, {1, padded});
}

Tensor as_strided(const Tensor& tensor, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
  AtenTensorHandle viewed = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.begin(),
                                                        strides.begin(), 0, &viewed));
  return Tensor(viewed);
}

DeviceGuard::DeviceGuard(int device) {
  int32_t current = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&current));
  if (current != device) guard_.emplace(device);  // torch's guard costs an allocation even where nothing changes
}

Stream current_stream(int device) {
  // The one symbol that only a CUDA torch has: looked up at run time, so that the module loads on a CPU-only torch too.
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  LTX_CHECK(function != nullptr, "ltx_kernels: this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(function(device, &stream));
  return static_cast<Stream>(stream);
}

void set_num_threads() {
  uint32_t num_threads = 0;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&num_threads));  // sets it for this thread when it first asks
}

void check_backend(const char* op, const char* name, const Device& device, bool has_cuda) {
  if (device.kind == Device::Kind::kCpu) return;
  LTX_CHECK(has_cuda, std::string(op) + ": " + name + " must be on cpu (this build has no CUDA code for the op), got " +
                          to_string(device));
  if constexpr (kBuiltCuda) {
    const std::string& lacking = cuda_device_lacks(device.index);
    LTX_CHECK(lacking.empty(),
              std::string(op) + ": " + name + " must be on cpu (" + lacking + "), got " + to_string(device));
  }
}

}  // namespace ltx
