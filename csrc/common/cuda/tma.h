#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "common/check.h"
#include "common/cuda/launch.h"

// TMA: boxes of matrices in device memory, described by a tensor map, to and from shared memory. What lies outside of
// the matrix reads as zero and is not written.
namespace ltx {

struct TensorMapMatrix {
  CUtensorMapDataType dtype;
  const void* data;  // a multiple of 16 bytes, as is the pitch
  int64_t rows;
  int64_t columns;
  int64_t pitch_bytes;
};

// A kernel takes the map in a __grid_constant__ argument.
inline CUtensorMap make_tensor_map(const char* op, const TensorMapMatrix& matrix, int box_rows, int box_columns,
                                   CUtensorMapSwizzle swizzle) {
  // Looked up at run time: the library loads where there is no driver.
  static const auto encode = [] {
    constexpr unsigned kFirstCudaWithTma = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstCudaWithTma, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  LTX_CHECK(encode != nullptr, std::string(op) + ": CUDA: the driver has no cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(matrix.pitch_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult status = encode(&map, matrix.dtype, 2, const_cast<void*>(matrix.data), sizes, pitch, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  LTX_CHECK(status == CUDA_SUCCESS,
            std::string(op) + ": CUDA: cuTensorMapEncodeTiled fails with " + std::to_string(static_cast<int>(status)));
  return map;
}

__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box whose first element is in `row` and `column`; its bytes are counted at `barrier`.
__device__ inline void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
// To the same place in each block of the cluster whose bit is set, counted at the barrier of each.
__device__ inline void load_box_to_cluster(uint32_t to, const CUtensorMap& map, uint32_t barrier, int row, int column,
                                           uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// Orders what this thread wrote to shared memory before stores by TMA; other threads' writes need a barrier after it.
__device__ inline void fence_before_tma_store() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void store_box(const CUtensorMap& map, uint32_t from, int row, int column) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the last kPending boxes that this thread stored have been read from shared memory.
template <int kPending>
__device__ inline void wait_until_stored() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace ltx
