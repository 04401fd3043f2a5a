#include "blockwise/adanorm_quantize/adanorm_quantize.h"

#include "blockwise/quantize_block_cuda.h"
#include "blockwise/row_kernel_cuda.h"
#include "common/cuda/norm_row.h"

namespace ltx {

namespace {

constexpr const char* kOp = "adanorm_quantize";

template <class RowsOfAll>
struct AdanormQuantizeArgs {
  Operand x;
  Operand w;
  Operand norm_scale;
  Operand norm_shift;
  RowsOfAll rows;  // of x, norm_scale, norm_shift
  QuantizedRows to;
  float hidden_inverse;
};

constexpr int kRowLanes = 2;
constexpr int kMaxThreads = kWarpSize * kSpreadWarps;

// What is applied to a lane of x. kWeighted: there is a w.
template <class Other, bool kWeighted>
struct Modulation {
  Lane<Other> w;
  Lane<Other> scale;
  Lane<Other> shift;
};

template <class Other, bool kWeighted, class Args>
__device__ Modulation<Other, kWeighted> load_modulation(const Args& args, int64_t scale_row, int64_t shift_row,
                                                        int64_t column, int left) {
  Modulation<Other, kWeighted> modulation = {};
  modulation.scale = load_lane<Other>(args.norm_scale, scale_row + column, left);
  modulation.shift = load_lane<Other>(args.norm_shift, shift_row + column, left);
  if constexpr (kWeighted) modulation.w = load_lane<Other>(args.w, column, left);
  return modulation;
}

template <class Other, bool kWeighted, class Args>
__device__ void modulate(const Args& args, const Modulation<Other, kWeighted>& modulation, float rstd,
                         float (&v)[kLaneValues]) {
  float w[kLaneValues];
  float scale[kLaneValues];
  float shift[kLaneValues];
  unpack_lane(modulation.scale, args.norm_scale.dtype, scale);
  unpack_lane(modulation.shift, args.norm_shift.dtype, shift);
  if constexpr (kWeighted) unpack_lane(modulation.w, args.w.dtype, w);
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    v[i] *= rstd;
    if constexpr (kWeighted) v[i] *= w[i];
    v[i] = __fmaf_rn(v[i], 1.0f + scale[i], shift[i]);
  }
}

// A block owns a row. A thread loads kRowLanes lanes of it at once, modulation and all, and holds them through the sum
// of squares. One barrier.
template <class X, class Other, bool kWeighted>
__global__ void __launch_bounds__(kMaxThreads)
    adanorm_quantize_kernel(const __grid_constant__ AdanormQuantizeArgs<ShortRows<3>> args) {
  __shared__ BlockSumShared<1> shared;
  const BlockRows rows = block_rows<1>(args.rows);
  const int hidden = static_cast<int>(args.to.hidden);
  wait_for_previous_kernel();
  Lane<X> x[kRowLanes] = {};
  Modulation<Other, kWeighted> modulation[kRowLanes] = {};
  const int64_t x_row = args.rows.offset(0, rows.outer, rows.inner);
  const int64_t scale_row = args.rows.offset(1, rows.outer, rows.inner);
  const int64_t shift_row = args.rows.offset(2, rows.outer, rows.inner);
#pragma unroll
  for (int l = 0; l < kRowLanes; ++l) {
    const int column = first_column() + l * lane_step();
    const int left = hidden - column;
    if (left > 0) {
      x[l] = load_lane<X>(args.x, x_row + column, left);
      modulation[l] = load_modulation<Other, kWeighted>(args, scale_row, shift_row, column, left);
    }
  }

  float v[kRowLanes][1][kLaneValues];
  float sums[1] = {};
#pragma unroll
  for (int l = 0; l < kRowLanes; ++l) {
    unpack_lane(x[l], args.x.dtype, v[l][0]);
    sums[0] += sum_of_squares(v[l][0]);
  }
  block_sum(sums, shared);
  let_next_kernel_start();

  const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, kAdanormEps);
#pragma unroll
  for (int l = 0; l < kRowLanes; ++l) {
    unpack_lane(x[l], args.x.dtype, v[l][0]);
    modulate(args, modulation[l], rstd, v[l][0]);
  }
  quantize_lanes<X>(args.to, rows.row, 1, first_column(), lane_step(), v);
}

// To the compiler the lane changes here, so that it unpacks it after this and not before the loop, into more registers.
template <class T>
__device__ void stay_packed(Lane<T>& lane) {
#pragma unroll
  for (uint32_t& word : lane.packed.words) asm volatile("" : "+r"(word));
}

// Rows that share a modulation of x's dtype: a block stays and walks them, so that it loads and unpacks the modulation
// once. The next row is on its way while this one is worked on.
// kSharedMinBlocks: of a multiprocessor, with 64 registers a thread where they suffice.
template <class X, bool kWeighted>
inline constexpr int kSharedMinBlocks = sizeof(X) == 2 && !kWeighted ? 2 : 1;

template <class X, bool kWeighted>
__global__ void __launch_bounds__(kMaxThreads, kSharedMinBlocks<X, kWeighted>)
    adanorm_quantize_shared_kernel(const __grid_constant__ AdanormQuantizeArgs<ShortRows<3>> args) {
  __shared__ SpreadSumShared<1> shared[2];
  if (threadIdx.x < sizeof(shared) / sizeof(float)) reinterpret_cast<float*>(shared)[threadIdx.x] = 0.0f;
  const int hidden = static_cast<int>(args.to.hidden);
  int64_t x_row = args.rows.offset(0, blockIdx.y, blockIdx.x);
  const int64_t x_step = gridDim.x * args.rows.inner_strides[0];
  wait_for_previous_kernel();

  Modulation<X, kWeighted> modulation[kRowLanes] = {};
  Lane<X> next[kRowLanes] = {};
#pragma unroll
  for (int l = 0; l < kRowLanes; ++l) {
    const int column = first_column() + l * lane_step();
    if (column < hidden) {
      // Not as read-only memory: the compiler would move the loads of the loop past its barrier.
      next[l] = load_lane<X, false>(args.x, x_row + column, hidden - column);
      modulation[l] = load_modulation<X, kWeighted>(args, args.rows.offset(1, blockIdx.y, 0),
                                                    args.rows.offset(2, blockIdx.y, 0), column, hidden - column);
    }
  }
  __syncthreads();

  int turn = 0;
#pragma unroll 1
  for (uint32_t inner = blockIdx.x; inner < args.rows.inner; inner += gridDim.x) {
    float v[kRowLanes][1][kLaneValues];
    float sums[1] = {};
#pragma unroll
    for (int l = 0; l < kRowLanes; ++l) {
      unpack_lane(next[l], args.x.dtype, v[l][0]);
      sums[0] += sum_of_squares(v[l][0]);
    }
    x_row += x_step;
    if (inner + gridDim.x < args.rows.inner) {
#pragma unroll
      for (int l = 0; l < kRowLanes; ++l) {
        const int column = first_column() + l * lane_step();
        if (column < hidden) next[l] = load_lane<X, false>(args.x, x_row + column, hidden - column);
      }
    } else {
      let_next_kernel_start();
    }
    spread_sum(sums, shared[turn]);
    turn ^= 1;

    const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, kAdanormEps);
#pragma unroll
    for (int l = 0; l < kRowLanes; ++l) {
      stay_packed(modulation[l].shift);
      modulate(args, modulation[l], rstd, v[l][0]);
    }
    quantize_lanes<X>(args.to, blockIdx.y * args.rows.inner + inner, 1, first_column(), lane_step(), v);
  }
}

// Any sizes, dtypes and alignment: a block owns a row and reads it twice, the second time from the caches. One barrier.
template <bool kWeighted>
__global__ void __launch_bounds__(kScalarRowThreads)
    adanorm_quantize_scalar_kernel(const __grid_constant__ AdanormQuantizeArgs<Rows<3>> args) {
  __shared__ BlockSumShared<1> shared;
  wait_for_previous_kernel();
  const int64_t row = scalar_row();
  if (row >= args.to.rows) return;
  const int64_t x_row = args.rows.offset(0, row);
  const int64_t scale_row = args.rows.offset(1, row);
  const int64_t shift_row = args.rows.offset(2, row);

  float sums[1] = {0.0f};
  for (int64_t column = threadIdx.x * kLaneValues; column < args.to.hidden; column += blockDim.x * kLaneValues) {
    sums[0] += sum_of_squares(load_lane<AnyTensor>(args.x, x_row + column, values_left(args.to.hidden, column)).values);
  }
  block_sum(sums, shared);
  let_next_kernel_start();

  const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, kAdanormEps);
  for (int64_t first = 0; first < args.to.hidden; first += blockDim.x * kLaneValues) {
    const int64_t column = first + threadIdx.x * kLaneValues;
    const int left = values_left(args.to.hidden, column);
    float lane[1][1][kLaneValues] = {};
    if (left > 0) {
      unpack_lane(load_lane<AnyTensor>(args.x, x_row + column, left), args.x.dtype, lane[0][0]);
      modulate(args, load_modulation<AnyTensor, kWeighted>(args, scale_row, shift_row, column, left), rstd, lane[0][0]);
    }
    quantize_lanes<AnyTensor>(args.to, row, 1, column, 0, lane);
  }
}

template <class RowsOfAll>
AdanormQuantizeArgs<RowsOfAll> args_of(const AdanormQuantizeParams& params, const RowsOfAll& rows) {
  return {.x = operand(params.x),
          .w = params.w ? operand(*params.w) : Operand{},
          .norm_scale = operand(params.norm_scale),
          .norm_shift = operand(params.norm_shift),
          .rows = rows,
          .to = quantized_rows(params.q, params.scales),
          .hidden_inverse = 1.0f / static_cast<float>(params.x.size(-1))};
}

// Few enough for the blocks to be resident together, and as many as share the rows evenly.
unsigned shared_blocks(uint32_t rows, unsigned outer, unsigned resident) {
  const uint32_t most = std::max(1u, resident / outer);
  const uint32_t turns = (rows + most - 1) / most;
  return (rows + turns - 1) / turns;
}

template <class X, bool kWeighted>
void launch_lanes(const AdanormQuantizeParams& params, const RowGrid<3>& grid, Stream stream) {
  const ShortRows<3>& rows = grid.rows;
  const DType dtype = params.x.dtype;
  const bool one_dtype =
      params.norm_scale.dtype == dtype && params.norm_shift.dtype == dtype && (!kWeighted || params.w->dtype == dtype);
  auto* kernel = one_dtype ? adanorm_quantize_kernel<X, X, kWeighted> : adanorm_quantize_kernel<X, AnyDtype, kWeighted>;
  dim3 blocks = grid.blocks;
  if (one_dtype && rows.inner_strides[1] == 0 && rows.inner_strides[2] == 0) {
    kernel = adanorm_quantize_shared_kernel<X, kWeighted>;
    const unsigned resident =
        kSharedMinBlocks<X, kWeighted> * kMaxThreads / grid.threads.x * cuda_num_sms(params.x.device.index);
    blocks.x = shared_blocks(rows.inner, rows.outer, resident);
  }
  launch_overlapping(kOp, kernel, blocks, grid.threads, params.x.device.index, stream, args_of(params, rows));
}

template <bool kWeighted>
void launch(const AdanormQuantizeParams& params, Stream stream) {
  const int64_t hidden = params.x.size(-1);
  const Rows<3> rows = make_rows<3>(params.x, {&params.x, &params.norm_scale, &params.norm_shift});
  if (rows.count == 0 || hidden == 0) return;
  const std::optional<RowGrid<3>> grid = row_grid<1, kRowLanes>(rows, hidden, kMaxThreads);
  if (grid && reads_lanes(params.x, hidden) && reads_lanes(params.norm_scale, hidden) &&
      reads_lanes(params.norm_shift, hidden) && (!kWeighted || reads_lanes(*params.w, hidden))) {
    with_float_type(params.x.dtype,
                    [&]<class X>(std::type_identity<X>) { launch_lanes<X, kWeighted>(params, *grid, stream); });
  } else {
    launch_overlapping(kOp, adanorm_quantize_scalar_kernel<kWeighted>, scalar_row_blocks(kOp, rows.count),
                       kScalarRowThreads, params.x.device.index, stream, args_of(params, rows));
  }
}

}  // namespace

void adanorm_quantize_cuda(const AdanormQuantizeParams& params, Stream stream) {
  adanorm_quantize_check(params);
  return params.w ? launch<true>(params, stream) : launch<false>(params, stream);
}

}  // namespace ltx
