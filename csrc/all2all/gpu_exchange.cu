#include <cuda_runtime.h>

#include "all2all/gpu_exchange.h"
#include "common/cuda/launch.h"

namespace ltx {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr uint64_t kGrace = 200'000'000;       // nanoseconds for the others once a peer is dead
constexpr uint64_t kParting = 10'000'000'000;  // nanoseconds for a wait without a timeout once the host is parting
constexpr unsigned kRoundsToLook = 64;         // of polling own memory, before a look at the clock and at peers' memory

__device__ uint64_t load_acquire(const uint64_t& word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
  return value;
}

__device__ void store_release(uint64_t& word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
}

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ int lane() { return static_cast<int>(threadIdx.x % kWarp); }

__device__ uint32_t peers_of(const GpuEnd& end) { return ((1U << end.world_size) - 1) & ~(1U << end.rank); }

__device__ uint64_t deadline_of(const GpuEnd& end) {
  return end.timeout == 0 ? ~uint64_t{0} : end.workspace[end.rank]->began + end.timeout;
}

// Of a warp: the peers of `peers` for which ready(p), asked by lane p, does not come true in time. Once one of them is
// dead, the others have kGrace.
template <class Ready>
__device__ uint32_t poll(const GpuEnd& end, uint32_t peers, const Ready& ready) {
  uint64_t deadline = deadline_of(end);
  bool missing = (peers >> lane() & 1) != 0;
  for (unsigned round = 1;; ++round) {  // overflows where there is no timeout
    const bool look = round % kRoundsToLook == 0;
    // Acquires what a dead peer has posted before.
    const bool dead = look && missing && load_acquire(end.workspace[lane()]->status) != 0;
    missing = missing && !ready(lane());
    const uint32_t absent = __ballot_sync(kAllLanes, missing);
    if (absent == 0) return 0;
    if (!look) continue;
    const uint64_t now = nanoseconds();
    if (__any_sync(kAllLanes, dead && missing)) deadline = min(deadline, now + kGrace);
    const bool parting = end.timeout == 0 && load_acquire(end.host->parting) != 0;
    if (__any_sync(kAllLanes, parting)) deadline = min(deadline, now + kParting);
    if (__any_sync(kAllLanes, now > deadline)) return absent;
    __nanosleep(100);
  }
}

// Of a warp: without the peers that did not arrive because they wait in vain for others of them.
__device__ uint32_t missing_of(const GpuEnd& end, uint32_t absent) {
  bool waits = false;
  if ((absent >> lane() & 1) != 0) {
    const Status status = unpack(load_acquire(end.workspace[lane()]->status));
    waits = status.kind == Status::Kind::kTimeout && (status.peers & absent & ~(1U << lane())) != 0;
  }
  const uint32_t missing = absent & ~__ballot_sync(kAllLanes, waits);
  return missing != 0 ? missing : absent;
}

// Of a warp. The first one's status stays.
__device__ void fail(const GpuEnd& end, Status::Kind kind, uint64_t epoch, uint32_t peers) {
  if (lane() != 0) return;
  const uint64_t status = pack({.kind = kind,
                                .op = static_cast<uint8_t>(end.op),
                                .rank = static_cast<uint8_t>(end.rank),
                                .peers = static_cast<uint8_t>(peers),
                                .epoch = static_cast<uint32_t>(epoch)});
  unsigned long long& word = reinterpret_cast<unsigned long long&>(end.workspace[end.rank]->status);
  __threadfence_system();  // orders all that this rank has posted before a peer's look at the status
  if (atomicCAS_system(&word, 0ULL, static_cast<unsigned long long>(status)) == 0)
    store_release(end.host->death, status);
}

// Of a warp, the same for all lanes though another block may write meanwhile.
__device__ bool is_dead(const GpuEnd& end) {
  return __any_sync(kAllLanes, load_acquire(end.workspace[end.rank]->status) != 0) != 0;
}

// Of a warp, lane p for peer p: its results up to `epoch` are consumed. Orders this rank's reads of them, in kernels
// before this one, before the peer's next stores there.
__device__ void tell_consumed(const GpuEnd& end, uint64_t epoch) {
  if ((peers_of(end) >> lane() & 1) != 0) store_release(end.workspace[lane()]->from[end.rank].consumed, epoch);
}

// A block is a warp: one rank's begin.
__global__ void begin_kernel(const __grid_constant__ GpuEnds ends) {
  const GpuEnd& end = ends.ends[blockIdx.x];
  if (is_dead(end)) return;
  Control& own = *end.workspace[end.rank];
  if (lane() == 0) own.began = nanoseconds();
  if (own.last_of[end.slot] == own.epoch) tell_consumed(end, own.epoch);  // else the push may read that result
}

// A block is a warp: one rank's result of the call that has ended is copied out.
__global__ void consumed_kernel(const __grid_constant__ GpuEnds ends) {
  const GpuEnd& end = ends.ends[blockIdx.x];
  if (!is_dead(end)) tell_consumed(end, end.workspace[end.rank]->epoch);
}

template <class Vector>
__device__ void copy_share(const BlockCopy& copy, const Share& share) {
  constexpr int kBytes = sizeof(Vector);
  const Pieces pieces = make_pieces(copy, kBytes);
  const int in_team = static_cast<int>(threadIdx.x) % pieces.team;
  const int teams = kPushThreads / pieces.team;
  const int64_t first = static_cast<int64_t>(blockIdx.x - share.first) * teams + threadIdx.x / pieces.team;
  for (int64_t i = first; i < pieces.total; i += static_cast<int64_t>(share.count) * teams) {
    const Piece piece = piece_at(copy, pieces, kBytes, i);
    const Vector* source = reinterpret_cast<const Vector*>(copy.source + piece.source);
    Vector* target = reinterpret_cast<Vector*>(copy.target + piece.target);
    Vector vectors[kPushVectors];
#pragma unroll
    for (int j = 0; j < kPushVectors; ++j) {
      if (in_team + j * pieces.team < piece.vectors) vectors[j] = __ldg(source + in_team + j * pieces.team);
    }
#pragma unroll
    for (int j = 0; j < kPushVectors; ++j) {
      if (in_team + j * pieces.team < piece.vectors) target[in_team + j * pieces.team] = vectors[j];
    }
  }
}

// Of a warp: whether the block may store to a peer.
__device__ bool may_store(const GpuEnd& end, int peer) {
  Control& own = *end.workspace[end.rank];
  const uint64_t last = own.last_of[end.slot];
  // Acquires what the peer has said in tell_consumed: its reads of this slot come before the stores that follow.
  const auto has_consumed = [&](int p) { return load_acquire(own.from[p].consumed) >= last; };
  if (poll(end, 1U << peer, has_consumed) == 0) return true;
  const bool absent = (peers_of(end) >> lane() & 1) != 0 && !has_consumed(lane());
  const uint32_t all_absent = __ballot_sync(kAllLanes, absent) | 1U << peer;
  fail(end, Status::Kind::kTimeout, own.epoch + 1, missing_of(end, all_absent));
  return false;
}

// A block stores its share of what goes to one peer, or to several one after the other. The last block that is done
// with a peer posts the arrival. Two block barriers a peer; nothing in shared memory but one flag.
template <class Vector>
__global__ void __launch_bounds__(kPushThreads) push_kernel(const __grid_constant__ PushArgs args) {
  __shared__ bool open;
  const GpuEnd& end = args.end;
  Control& own = *end.workspace[end.rank];
  const int block = static_cast<int>(blockIdx.x);
  for (int peer = 0; peer < end.world_size; ++peer) {
    const Share& share = args.shares[peer];
    if (block < share.first || block >= share.first + share.count) continue;
    if (threadIdx.x < kWarp) {
      const bool opens = !is_dead(end) && (peer == end.rank || may_store(end, peer));
      if (threadIdx.x == 0) open = opens;
    }
    __syncthreads();
    if (!open) return;
    for (int i = 0; i < args.num_tensors; ++i) copy_share<Vector>(args.copies[peer][i], share);
    __syncthreads();
    if (threadIdx.x != 0 || peer == end.rank) continue;
    __threadfence_system();  // orders the stores of this block before its count, which the last block sees
    if (atomicInc(&own.pushed[peer], share.count - 1) != share.count - 1) continue;
    __threadfence_system();  // orders the counts of the other blocks before the arrival
    Arrival& posted = end.workspace[peer]->from[end.rank].arrived[end.slot];
    posted.hash = end.hash;
    store_release(posted.epoch, own.epoch + 1);  // orders all stores to the peer before its reads of them
  }
}

// A block is a warp: one rank's wait, lane p for peer p. It ends the call.
__global__ void wait_kernel(const __grid_constant__ GpuEnds ends) {
  const GpuEnd& end = ends.ends[blockIdx.x];
  if (is_dead(end)) return;
  Control& own = *end.workspace[end.rank];
  const uint64_t epoch = own.epoch + 1;
  tell_consumed(end, epoch - 1);
  bool disagrees = false;
  const uint32_t absent = poll(end, peers_of(end), [&](int peer) {
    const Arrival& arrival = own.from[peer].arrived[end.slot];
    if (load_acquire(arrival.epoch) < epoch) return false;  // acquires the peer's stores into this rank's slot
    disagrees = load_acquire(arrival.hash) != end.hash;
    return true;
  });
  const uint32_t disagree = __ballot_sync(kAllLanes, disagrees);
  if (disagree != 0) {
    fail(end, Status::Kind::kMismatch, epoch, disagree);
  } else if (absent != 0) {
    fail(end, Status::Kind::kTimeout, epoch, missing_of(end, absent));
  } else if (lane() == 0) {
    own.last_of[end.slot] = epoch;
    own.epoch = epoch;
  }
}

// Calls call(push_kernel<Vector>) for accesses of so many bytes.
template <class Call>
void with_push_kernel(int vector_bytes, const Call& call) {
  switch (vector_bytes) {
    case 16:
      return call(push_kernel<uint4>);
    case 8:
      return call(push_kernel<uint2>);
    case 4:
      return call(push_kernel<uint32_t>);
    case 2:
      return call(push_kernel<uint16_t>);
    case 1:
      return call(push_kernel<uint8_t>);
    default:
      LTX_UNREACHABLE("with_push_kernel: " + std::to_string(vector_bytes));
  }
}

void check_launch(const GpuEnd& end) { LTX_CUDA_CHECK(cudaGetLastError(), name_of(end.op)); }

}  // namespace

void launch_begin(const GpuEnds& ends, Stream stream) {
  begin_kernel<<<ends.count, kWarp, 0, stream>>>(ends);
  check_launch(ends.ends[0]);
}

void launch_consumed(const GpuEnds& ends, Stream stream) {
  consumed_kernel<<<ends.count, kWarp, 0, stream>>>(ends);
  check_launch(ends.ends[0]);
}

void launch_push(const PushArgs& args, int num_blocks, int vector_bytes, Stream stream) {
  with_push_kernel(vector_bytes, [&](auto* kernel) { kernel<<<num_blocks, kPushThreads, 0, stream>>>(args); });
  check_launch(args.end);
}

void launch_wait(const GpuEnds& ends, Stream stream) {
  wait_kernel<<<ends.count, kWarp, 0, stream>>>(ends);
  check_launch(ends.ends[0]);
}

void load_exchange_kernels() {
  cudaFuncAttributes attributes;
  const auto load = [&](auto* kernel) { LTX_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel), "All2All"); };
  load(begin_kernel);
  load(consumed_kernel);
  load(wait_kernel);
  for (int bytes = 1; bytes <= kMostVectorBytes; bytes *= 2) with_push_kernel(bytes, load);
}

}  // namespace ltx
