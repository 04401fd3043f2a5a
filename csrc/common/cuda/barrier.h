#pragma once

#include <cstdint>

// mbarriers: a phase ends when all its arrivals have come and all bytes that they announced. Waiting for parity p
// returns once the phase with that parity has ended; phases begin at 0, so that parity 1 of a new barrier has. An
// arrival releases and a wait acquires, for the threads of the block, what lies before and after them.
namespace ltx {

__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Orders init_barrier before arrivals of other blocks of the cluster and of TMA; a cluster_sync must follow.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and announces bytes that TMA or store_async will write.
__device__ inline void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// These two are predicated instructions: a branch between wgmmas makes the compiler wait for each.
__device__ inline void arrive_if(bool condition, uint32_t barrier) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier),
               "r"(static_cast<int>(condition))
               : "memory");
}
// At the barrier of another block. Without .release.cluster, which would cost a fence for the whole GPU a call: it
// orders nothing between blocks but the reads of wgmma, which are complete, before TMA's next write.
__device__ inline void arrive_in_cluster_if(bool condition, uint32_t barrier, int rank) {
  asm volatile(
      "{.reg .pred p; .reg .u32 address; setp.ne.b32 p, %2, 0; mapa.shared::cluster.u32 address, %0, %1; "
      "@p mbarrier.arrive.shared::cluster.b64 _, [address];}" ::"r"(barrier),
      "r"(rank), "r"(static_cast<int>(condition))
      : "memory");
}

__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Acquires what other blocks of the cluster have written.
__device__ inline void wait_for_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
      "bra WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// 16 bytes to another block's shared memory, counted at that block's barrier.
__device__ inline void store_async(uint32_t address, uint32_t barrier, float a, float b, float c, float d) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
      "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

}  // namespace ltx
