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
  Operand w;  // data is null without one
  Operand norm_scale;
  Operand norm_shift;
  RowsOfAll rows;  // of x, norm_scale, norm_shift
  QuantizedRows to;
  float hidden_inverse;
};

constexpr int kMaxThreads = 512;

// What is applied to a lane of x.
template <class Other>
struct Modulation {
  Lane<Other> w;
  Lane<Other> scale;
  Lane<Other> shift;
};

template <class Other, class Args>
__device__ Modulation<Other> load_modulation(const Args& args, int64_t scale_row, int64_t shift_row, int64_t column) {
  const int left = values_left(args.to.hidden, column);
  Modulation<Other> modulation = {};
  modulation.scale = load_lane<Other>(args.norm_scale, scale_row + column, left);
  modulation.shift = load_lane<Other>(args.norm_shift, shift_row + column, left);
  if (args.w.data != nullptr) modulation.w = load_lane<Other>(args.w, column, left);
  return modulation;
}

// The same lane of kRows rows.
template <int kRows, class Other, class Args>
__device__ void modulate(const Args& args, const Modulation<Other>& modulation, const float (&rstd)[kRows],
                         float (&v)[kRows][kLaneValues]) {
  float w[kLaneValues];
  float scale[kLaneValues];
  float shift[kLaneValues];
  unpack_lane(modulation.scale, args.norm_scale.dtype, scale);
  unpack_lane(modulation.shift, args.norm_shift.dtype, shift);
  if (args.w.data != nullptr) unpack_lane(modulation.w, args.w.dtype, w);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) v[r][i] *= rstd[r];
    if (args.w.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) v[r][i] *= w[i];
    }
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) v[r][i] = __fmaf_rn(v[r][i], 1.0f + scale[i], shift[i]);
  }
}

// A block owns kRows rows, two where they share a modulation, so that what is done to it is done once. A thread owns
// kLanes lanes of each row, which it loads at once, modulation and all, and holds through the sums of squares. One
// barrier.
template <class X, class Other, int kRows, int kLanes>
__global__ void __launch_bounds__(kMaxThreads)
    adanorm_quantize_kernel(const __grid_constant__ AdanormQuantizeArgs<ShortRows<3>> args) {
  __shared__ BlockSumShared<kRows> shared;
  const BlockRows rows = block_rows<kRows>(args.rows);
  const int hidden = static_cast<int>(args.to.hidden);
  wait_for_previous_kernel();
  Lane<X> x[kLanes][kRows] = {};
  Modulation<Other> modulation[kLanes] = {};
  const int64_t x_row = args.rows.offset(0, rows.outer, rows.inner);
  const int64_t scale_row = args.rows.offset(1, rows.outer, rows.inner);
  const int64_t shift_row = args.rows.offset(2, rows.outer, rows.inner);
#pragma unroll
  for (int l = 0; l < kLanes; ++l) {
    const int column = first_column() + l * lane_step();
    if (column < hidden) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t offset = x_row + r * args.rows.inner_strides[0] + column;
        if (r < rows.count) x[l][r] = load_lane<X>(args.x, offset, hidden - column);
      }
      modulation[l] = load_modulation<Other>(args, scale_row, shift_row, column);
    }
  }

  float v[kLanes][kRows][kLaneValues];
  float sums[kRows] = {};
#pragma unroll
  for (int l = 0; l < kLanes; ++l) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack_lane(x[l][r], args.x.dtype, v[l][r]);
      sums[r] += sum_of_squares(v[l][r]);
    }
  }
  block_sum(sums, shared);
  let_next_kernel_start();

  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstd[r] = reciprocal_rms(sums[r], args.hidden_inverse, kAdanormEps);
#pragma unroll
  for (int l = 0; l < kLanes; ++l) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) unpack_lane(x[l][r], args.x.dtype, v[l][r]);
    modulate(args, modulation[l], rstd, v[l]);
  }
  quantize_lanes<X>(args.to, rows.row, rows.count, first_column(), lane_step(), v);
}

// Any sizes, dtypes and alignment: a block owns a row and reads it twice, the second time from the caches. One barrier.
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

  const float rstd[1] = {reciprocal_rms(sums[0], args.hidden_inverse, kAdanormEps)};
  for (int64_t first = 0; first < args.to.hidden; first += blockDim.x * kLaneValues) {
    const int64_t column = first + threadIdx.x * kLaneValues;
    const int left = values_left(args.to.hidden, column);
    float lane[1][1][kLaneValues] = {};
    if (left > 0) {
      unpack_lane(load_lane<AnyTensor>(args.x, x_row + column, left), args.x.dtype, lane[0][0]);
      modulate(args, load_modulation<AnyTensor>(args, scale_row, shift_row, column), rstd, lane[0]);
    }
    quantize_lanes<AnyTensor>(args.to, row, 1, column, 0, lane);
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

// False if the rows do not fit.
template <int kRows, int kLanes>
bool launch(const AdanormQuantizeParams& params, const Rows<3>& rows, Stream stream) {
  const std::optional<RowGrid<3>> grid = row_grid<kRows, kLanes>(rows, params.x.size(-1), kMaxThreads);
  if (!grid) return false;
  const DType dtype = params.x.dtype;
  const bool one_dtype =
      params.norm_scale.dtype == dtype && params.norm_shift.dtype == dtype && (!params.w || params.w->dtype == dtype);
  with_float_type(dtype, [&]<class X>(std::type_identity<X>) {
    auto* kernel = adanorm_quantize_kernel<X, AnyDtype, kRows, kLanes>;
    if (one_dtype) kernel = adanorm_quantize_kernel<X, X, kRows, kLanes>;
    launch_overlapping(kOp, kernel, grid->blocks, grid->threads, params.x.device.index, stream,
                       args_of(params, grid->rows));
  });
  return true;
}

}  // namespace

void adanorm_quantize_cuda(const AdanormQuantizeParams& params, Stream stream) {
  adanorm_quantize_check(params);
  const int64_t hidden = params.x.size(-1);
  const Rows<3> rows = make_rows<3>(params.x, {&params.x, &params.norm_scale, &params.norm_shift});
  if (rows.count == 0 || hidden == 0) return;
  const bool lanes = reads_lanes(params.x, hidden) && reads_lanes(params.norm_scale, hidden) &&
                     reads_lanes(params.norm_shift, hidden) && (!params.w || reads_lanes(*params.w, hidden));
  const int last = rows.rank - 1;
  const bool shared = rows.rank > 0 && rows.strides[1][last] == 0 && rows.strides[2][last] == 0;
  if (lanes && shared && launch<2, 2>(params, rows, stream)) return;
  if (lanes && launch<1, 2>(params, rows, stream)) return;
  launch_overlapping(kOp, adanorm_quantize_scalar_kernel, scalar_row_blocks(kOp, rows.count), kScalarRowThreads,
                     params.x.device.index, stream, args_of(params, rows));
}

}  // namespace ltx
