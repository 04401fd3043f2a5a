#pragma once

#include <cstdint>

// cp.async: copies from device to shared memory that the thread does not wait for, from compute capability 8.0 on. They
// are committed in groups, and groups complete in order.
namespace ltx {

// 16 bytes, both addresses multiples of 16: the first `bytes` from device memory, zeros after them. Of `bytes` 0 the
// source may lie anywhere at such a multiple.
__device__ inline void copy_16_bytes_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last kPending groups of this thread are there; other threads' need a barrier after it.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ltx
