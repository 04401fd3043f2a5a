#include "blockwise/fp8_gemm/fp8_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "blockwise/fp8_gemm/fp8_gemm_cuda.h"
#include "common/built.h"
#include "common/cuda/launch.h"
#include "ops/fp6/fp6.h"

// Brings b, a_scales and bias into the form that the kernels read, where they have another, and calls the device's
// kernel.
namespace ltx {

namespace {

constexpr int kThreads = 128;
constexpr int kColumnsPerThread = 8;  // of a row-major matrix: one 32-byte sector of fp32

struct Copy {
  const void* from;
  int64_t row_stride;
  int64_t column_stride;
  float* to;  // [columns, padded_rows]
  int64_t padded_rows;
  int rows;
  int columns;
};

// A thread has a row, so that writes are consecutive over a warp, and some columns of it.
template <class T>
__global__ void __launch_bounds__(kThreads) copy_column_major_kernel(Copy copy) {
  const int row_blocks = (copy.rows + kThreads - 1) / kThreads;
  const int column_block = static_cast<int>(blockIdx.x) / row_blocks;
  const int row_block = static_cast<int>(blockIdx.x) - column_block * row_blocks;
  const int row = row_block * kThreads + static_cast<int>(threadIdx.x);
  if (row >= copy.rows) return;
  const T* from = static_cast<const T*>(copy.from) + row * copy.row_stride;
  const int first = column_block * kColumnsPerThread;
  const int end = min(first + kColumnsPerThread, copy.columns);
  for (int column = first; column < end; ++column) {
    copy.to[column * copy.padded_rows + row] = static_cast<float>(from[column * copy.column_stride]);
  }
}

// `view`, a matrix or a vector, in fp32 at `to`: columns one after the other, each padded to a multiple of 16 bytes.
TensorView copy_column_major(const TensorView& view, void* to, Stream stream) {
  const int64_t rows = view.size(0);
  const int64_t columns = view.rank == 2 ? view.size(1) : 1;
  const Copy copy{.from = view.data,
                  .row_stride = view.stride(0),
                  .column_stride = view.rank == 2 ? view.stride(1) : 0,
                  .to = static_cast<float*>(to),
                  .padded_rows = padded_rows(rows),
                  .rows = static_cast<int>(rows),
                  .columns = static_cast<int>(columns)};
  const auto kernel = view.dtype == DType::kFloat32   ? copy_column_major_kernel<float>
                      : view.dtype == DType::kFloat16 ? copy_column_major_kernel<__half>
                                                      : copy_column_major_kernel<__nv_bfloat16>;
  const int64_t blocks = ceil_div(rows, kThreads) * ceil_div(columns, kColumnsPerThread);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(copy);
  LTX_CUDA_CHECK(cudaGetLastError(), "fp8_gemm");
  TensorView copied = view;
  copied.data = to;
  copied.dtype = DType::kFloat32;
  copied.strides = {1, copy.padded_rows};
  return copied;
}

TensorView unpack(const TensorView& b, int64_t k, void* to, Stream stream) {
  const TensorView bytes = contiguous_view<2>(to, DType::kUint8, {b.size(0), k}, b.device);
  fp6_unpack_cuda({.x = b, .original_n = k, .out = bytes}, stream);
  TensorView unpacked = bytes;
  unpacked.dtype = DType::kFp8;
  return unpacked;
}

}  // namespace

std::string fp8_gemm_device_lacks(int device, int arch) {
  const int capability = cuda_capability(device);
  const bool has_kernel = arch == 90 ? kBuiltSm90 && capability == 90 : kBuiltSm89 && capability >= 89;
  if (has_kernel) return "";
  return "needs sm_" + std::to_string(arch) + ", device " + std::to_string(device) + " is sm_" +
         std::to_string(capability);
}

void fp8_gemm_cuda(const Fp8GemmParams& params, Stream stream) {
  fp8_gemm_check(params);
  const int64_t m = params.a.size(0);
  const int64_t n = params.b.size(0);
  const int64_t k = params.a.size(1);
  if (m == 0) return;
  Fp8GemmParams readable = params;
  readable.use_fast_accum = params.use_fast_accum && params.b.dtype == DType::kUint8;
  uint8_t* workspace = static_cast<uint8_t*>(params.workspace);
  if (params.b.dtype == DType::kUint8) {
    readable.b = unpack(params.b, k, workspace, stream);
    workspace += n * k;
  }
  if (!fp8_gemm_reads_scales(params.a_scales)) {
    readable.a_scales = copy_column_major(params.a_scales, workspace, stream);
    workspace += num_blocks(k) * padded_rows(m) * 4;
  }
  if (params.bias && !fp8_gemm_reads_bias(*params.bias)) {
    readable.bias = copy_column_major(*params.bias, workspace, stream);
  }

  const int device = params.a.device.index;
  const int arch = params.config ? params.config->arch : kFp8GemmPublicArch;
  const std::string lacking = fp8_gemm_device_lacks(device, arch);
  LTX_CHECK(lacking.empty(), "fp8_gemm: " + lacking);
  const Fp8GemmConfig config =
      params.config ? *params.config : *fp8_gemm_config(m, n, k, cuda_num_sms(device), cuda_capability(device));
  if (arch == 89) {
    if constexpr (kBuiltSm89) fp8_gemm_sm89(readable, config, stream);
  } else {
    if constexpr (kBuiltSm90) fp8_gemm_sm90(readable, config, stream);
  }
}

}  // namespace ltx
