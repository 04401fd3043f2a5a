#include "blockwise/quantize_weights/quantize_weights.h"

#include "blockwise/quantize_block_cuda.h"
#include "common/cuda/reduce.h"

// A block of threads owns a tile of 128 x 128 weights, which it reads once: a thread holds eight columns of every 16th
// row, 64 values, from the load to the end. One barrier.
namespace ltx {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = kThreads / kBlockLanes;
constexpr int kThreadRows = static_cast<int>(kBlockSize) / kRowsAtOnce;

struct QuantizeWeightsArgs {
  Operand w;
  __nv_fp8_e4m3* q;
  float* scales;
  int64_t out;
  int64_t in;
  int64_t w_stride;
  float scale_max;
};

__device__ inline BlockScale tile_scale(float amax, float scale_max) {
  const bool poisoned = !(amax < __uint_as_float(kInfinityBits));
  const float amax_c = fmaxf(amax, kSmallestAmax);
  return {.multiplier = poisoned ? 0.0f : __fdiv_rn(scale_max, amax_c),
          .scale = poisoned ? __uint_as_float(kQuietNanBits) : __fdiv_rn(amax_c, scale_max)};
}

// Blocks of a multiprocessor: with 1 nvcc takes the registers that it needs, with none it aims at 80 and may spill.
template <class W>
inline constexpr int kMinBlocks = std::is_same_v<W, AnyTensor> ? 1 : 0;

template <class W>
__global__ void __launch_bounds__(kThreads, kMinBlocks<W>)
    quantize_weights_kernel(const __grid_constant__ QuantizeWeightsArgs args) {
  __shared__ uint32_t shared[kThreads / kWarpSize];
  const int64_t tile_row = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  const int64_t first_row = tile_row * kBlockSize + threadIdx.x / kBlockLanes;
  const int64_t column = blockIdx.x * kBlockSize + threadIdx.x % kBlockLanes * kLaneValues;
  const int left = values_left(args.in, column);
  wait_for_previous_kernel();
  Lane<W> w[kThreadRows] = {};
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int64_t row = first_row + i * kRowsAtOnce;
    if (row < args.out && left > 0) w[i] = load_lane<W>(args.w, row * args.w_stride + column, left);
  }

  float values[kLaneValues];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    unpack_lane(w[i], args.w.dtype, values);
#pragma unroll
    for (int j = 0; j < kLaneValues; ++j) amax = larger_magnitude(amax, values[j]);
  }
  const uint32_t warp_amax = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(amax));
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = warp_amax;
  __syncthreads();
  let_next_kernel_start();
  uint32_t tile_amax = 0;
#pragma unroll
  for (const uint32_t other : shared) tile_amax = max(tile_amax, other);

  const BlockScale scale = tile_scale(__uint_as_float(tile_amax), args.scale_max);
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int64_t row = first_row + i * kRowsAtOnce;
    unpack_lane(w[i], args.w.dtype, values);
    const Packed<__nv_fp8_e4m3, kLaneValues> q = encode_lane(values, scale.multiplier, isnan(scale.scale));
    if (row < args.out) store_lane<W>(args.q + row * args.in + column, left, q);
  }
  if (threadIdx.x == 0 && first_row < args.out) args.scales[tile_row * gridDim.x + blockIdx.x] = scale.scale;
}

}  // namespace

void quantize_weights_cuda(const QuantizeWeightsParams& params, Stream stream) {
  constexpr const char* kOp = "quantize_weights";
  constexpr int64_t kMaxGridYZ = 65535;
  quantize_weights_check(params);
  const QuantizeWeightsArgs args{.w = operand(params.w),
                                 .q = static_cast<__nv_fp8_e4m3*>(params.q.data),
                                 .scales = static_cast<float*>(params.scales.data),
                                 .out = params.w.size(0),
                                 .in = params.w.size(1),
                                 .w_stride = params.w.stride(0),
                                 .scale_max = static_cast<float>(params.scale_max)};
  if (args.out == 0 || args.in == 0) return;
  const int64_t down = num_blocks(args.out);
  const int64_t z = (down + kMaxGridYZ - 1) / kMaxGridYZ;
  const dim3 blocks(static_cast<unsigned>(num_blocks(args.in)), static_cast<unsigned>((down + z - 1) / z),
                    static_cast<unsigned>(z));
  const auto launch = [&]<class W>(std::type_identity<W>) {
    launch_overlapping(kOp, quantize_weights_kernel<W>, blocks, kThreads, params.w.device.index, stream, args);
  };
  if (reads_lanes(params.w, args.in)) {
    with_float_type(params.w.dtype, launch);
  } else {
    launch(std::type_identity<AnyTensor>());
  }
}

}  // namespace ltx
