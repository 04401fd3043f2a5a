#include "blockwise/adanorm_quantize/adanorm_quantize.h"

#include "blockwise/quantize_block_cuda.h"
#include "blockwise/row_kernel_cuda.h"
#include "ops/norm_row_cuda.h"

namespace ltx {

namespace {

template <class RowsOfAll>
struct AdanormQuantizeArgs {
  Operand x;
  Operand w;  // data is null without one
  Operand norm_scale;
  Operand norm_shift;
  RowsOfAll rows;  // of x, norm_scale, norm_shift
  QuantizedRows to;
  float hidden_inverse;
};

// What is applied to a lane of x.
template <class Other>
struct Modulation {
  Lane<Other> w;
  Lane<Other> scale;
  Lane<Other> shift;
};

template <class Other, class Args>
__device__ Modulation<Other> load_modulation(const Args& args, int64_t scale_row, int64_t shift_row, int64_t column) {
  const int64_t left = args.to.hidden - column;
  Modulation<Other> modulation = {};
  modulation.scale = load_lane<Other>(args.norm_scale, scale_row + column, left);
  modulation.shift = load_lane<Other>(args.norm_shift, shift_row + column, left);
  if (args.w.data != nullptr) modulation.w = load_lane<Other>(args.w, column, left);
  return modulation;
}

template <class Other, class Args>
__device__ void modulate(const Args& args, const Modulation<Other>& modulation, float rstd, float (&v)[kLaneValues]) {
  float w[kLaneValues];
  float scale[kLaneValues];
  float shift[kLaneValues];
  unpack_lane(modulation.scale, args.norm_scale.dtype, scale);
  unpack_lane(modulation.shift, args.norm_shift.dtype, shift);
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) v[i] *= rstd;
  if (args.w.data != nullptr) {
    unpack_lane(modulation.w, args.w.dtype, w);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) v[i] *= w[i];
  }
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) v[i] = v[i] * (1.0f + scale[i]) + shift[i];
}

// A block owns a row, a thread kRowLanes lanes of it, which it loads at once, modulation and all, and holds through the
// sum of squares. One barrier.
template <class X, class Other>
__global__ void __launch_bounds__(kMaxRowThreads)
    adanorm_quantize_kernel(const __grid_constant__ AdanormQuantizeArgs<ShortRows<3>> args) {
  __shared__ BlockSumShared<1> shared;
  wait_for_previous_kernel();
  Lane<X> x[kRowLanes] = {};
  Modulation<Other> modulation[kRowLanes] = {};
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    const int column = row_column(i);
    if (column < args.to.hidden)
      x[i] = load_lane<X>(args.x, row_offset(args.rows, 0) + column, args.to.hidden - column);
  }
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    const int column = row_column(i);
    if (column < args.to.hidden) {
      modulation[i] = load_modulation<Other>(args, row_offset(args.rows, 1), row_offset(args.rows, 2), column);
    }
  }

  float v[kLaneValues];
  float sums[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    unpack_lane(x[i], args.x.dtype, v);
    sums[0] += sum_of_squares(v);
  }
  block_sum(sums, shared);
  let_next_kernel_start();

  const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, kAdanormEps);
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    float lane[1][kLaneValues];
    unpack_lane(x[i], args.x.dtype, lane[0]);
    modulate(args, modulation[i], rstd, lane[0]);
    if (row_column(i) >= args.to.hidden) clear(lane[0]);
    quantize_lanes<X>(args.to, row_index(), row_column(i), lane);
  }
}

// Any sizes, dtypes and alignment: a block owns a row and reads it twice, the second time from the caches. One barrier.
__global__ void __launch_bounds__(kMaxRowThreads)
    adanorm_quantize_scalar_kernel(const __grid_constant__ AdanormQuantizeArgs<Rows<3>> args) {
  __shared__ BlockSumShared<1> shared;
  wait_for_previous_kernel();
  const int64_t row = row_index();
  if (row >= args.to.rows) return;
  const int64_t x_row = args.rows.offset(0, row);
  const int64_t scale_row = args.rows.offset(1, row);
  const int64_t shift_row = args.rows.offset(2, row);

  float lane[1][kLaneValues];
  float sums[1] = {0.0f};
  for (int64_t column = threadIdx.x * kLaneValues; column < args.to.hidden; column += blockDim.x * kLaneValues) {
    unpack_lane(load_lane<AnyTensor>(args.x, x_row + column, args.to.hidden - column), args.x.dtype, lane[0]);
    sums[0] += sum_of_squares(lane[0]);
  }
  block_sum(sums, shared);
  let_next_kernel_start();

  const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, kAdanormEps);
  for (int64_t first = 0; first < args.to.hidden; first += blockDim.x * kLaneValues) {
    const int64_t column = first + threadIdx.x * kLaneValues;
    const int64_t left = args.to.hidden - column;
    clear(lane[0]);
    if (left > 0) {
      unpack_lane(load_lane<AnyTensor>(args.x, x_row + column, left), args.x.dtype, lane[0]);
      modulate(args, load_modulation<AnyTensor>(args, scale_row, shift_row, column), rstd, lane[0]);
      // Past the end there is no 0: rstd may be NaN.
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) lane[0][i] = i < left ? lane[0][i] : 0.0f;
    }
    quantize_lanes<AnyTensor>(args.to, row, column, lane);
  }
}

template <class RowsOfAll>
AdanormQuantizeArgs<RowsOfAll> args_of(const AdanormQuantizeParams& params, const RowsOfAll& rows) {
  return {.x = operand(params.x),
          .w = params.w ? operand(*params.w) : Operand{.data = nullptr, .dtype = DType::kFloat32},
          .norm_scale = operand(params.norm_scale),
          .norm_shift = operand(params.norm_shift),
          .rows = rows,
          .to = quantized_rows(params.q, params.scales),
          .hidden_inverse = 1.0f / static_cast<float>(params.x.size(-1))};
}

}  // namespace

void adanorm_quantize_cuda(const AdanormQuantizeParams& params, Stream stream) {
  constexpr const char* kOp = "adanorm_quantize";
  adanorm_quantize_check(params);
  const int64_t hidden = params.x.size(-1);
  const int device = params.x.device.index;
  const Rows<3> rows = make_rows<3>(params.x, {&params.x, &params.norm_scale, &params.norm_shift});
  if (rows.count == 0 || hidden == 0) return;

  const std::optional<RowGrid<3>> grid = row_grid(rows, hidden);
  if (grid && reads_lanes(params.x, hidden) && reads_lanes(params.norm_scale, hidden) &&
      reads_lanes(params.norm_shift, hidden) && (!params.w || reads_lanes(*params.w, hidden))) {
    const DType dtype = params.x.dtype;
    const bool one_dtype =
        params.norm_scale.dtype == dtype && params.norm_shift.dtype == dtype && (!params.w || params.w->dtype == dtype);
    with_float_type(dtype, [&]<class X>(std::type_identity<X>) {
      auto* kernel = one_dtype ? adanorm_quantize_kernel<X, X> : adanorm_quantize_kernel<X, AnyDtype>;
      launch_overlapping(kOp, kernel, grid->blocks, grid->threads, device, stream, args_of(params, grid->rows));
    });
  } else {
    launch_overlapping(kOp, adanorm_quantize_scalar_kernel, scalar_row_blocks(kOp, rows.count), kMaxRowThreads, device,
                       stream, args_of(params, rows));
  }
}

}  // namespace ltx
