#include "blockwise/rms_fma_quantize/rms_fma_quantize.h"

#include "blockwise/quantize_block_cuda.h"
#include "blockwise/row_kernel_cuda.h"
#include "common/cuda/norm_row.h"

namespace ltx {

namespace {

constexpr int kRowLanes = 2;
constexpr int kMaxThreads = 512;

template <class RowsOfAll>
struct RmsFmaArgs {
  Operand x;
  Operand y;
  Operand z;
  void* new_x;         // the memory of x
  RowsOfAll rows;      // of x, y, z
  QuantizedRows to;    // of rms_fma its sizes alone
  __nv_bfloat16* out;  // of rms_fma
  float hidden_inverse;
};

// The new x of a lane, in fp32 and not yet rounded to its dtype.
__device__ inline void fused_multiply_add(const float (&y)[kLaneValues], const float (&z)[kLaneValues],
                                          float (&x)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) x[i] = __fmaf_rn(y[i], z[i], x[i]);
}

// v: lanes of one row, lane_step columns apart.
template <class X, bool kQuantize, class Args, int kLanes>
__device__ void finish(const Args& args, LaneIndex<X> row, LaneIndex<X> column, int lane_step,
                       const float (&v)[kLanes][1][kLaneValues]) {
  if constexpr (kQuantize) {
    quantize_lanes<X>(args.to, row, 1, column, lane_step, v);
  } else {
#pragma unroll
    for (int l = 0; l < kLanes; ++l) {
      Packed<__nv_bfloat16, kLaneValues> out;
      pack(v[l][0], out);
      store_lane<X>(args.out + static_cast<uint64_t>(row) * args.to.hidden + column + l * lane_step,
                    values_left(args.to.hidden, column) - l * lane_step, out);
    }
  }
}

// A block owns a row, a thread kRowLanes lanes of it. The thread loads all that it needs at once, stores the new x and
// holds it, rounded, through the sum of squares. One barrier.
template <class X, class Other, bool kQuantize>
__global__ void __launch_bounds__(kMaxThreads) rms_fma_kernel(const __grid_constant__ RmsFmaArgs<ShortRows<3>> args) {
  __shared__ BlockSumShared<1> shared;
  const BlockRows rows = block_rows<1>(args.rows);
  const int hidden = static_cast<int>(args.to.hidden);
  const int64_t x_row = args.rows.offset(0, rows.outer, rows.inner);
  const int64_t y_row = args.rows.offset(1, rows.outer, rows.inner);
  const int64_t z_row = args.rows.offset(2, rows.outer, rows.inner);
  wait_for_previous_kernel();
  Lane<X> x[kRowLanes] = {};
  Lane<Other> y[kRowLanes] = {};
  Lane<Other> z[kRowLanes] = {};
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    const int column = first_column() + i * lane_step();
    const int left = hidden - column;
    if (left > 0) {
      x[i] = load_lane<X, false>(args.x, x_row + column, left);
      y[i] = load_lane<Other>(args.y, y_row + column, left);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    const int column = first_column() + i * lane_step();
    const int left = hidden - column;
    if (left > 0) z[i] = load_lane<Other>(args.z, z_row + column, left);
  }

  float sums[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    float sum_x[kLaneValues];
    float y_values[kLaneValues];
    float z_values[kLaneValues];
    unpack_lane(x[i], args.x.dtype, sum_x);
    unpack_lane(y[i], args.y.dtype, y_values);
    unpack_lane(z[i], args.z.dtype, z_values);
    fused_multiply_add(y_values, z_values, sum_x);
    pack(sum_x, x[i].packed);
    if (first_column() + i * lane_step() < hidden) {
      store(static_cast<X*>(args.new_x) + x_row + first_column() + i * lane_step(), x[i].packed);
    }
    unpack_lane(x[i], args.x.dtype, sum_x);  // rounded
    sums[0] += sum_of_squares(sum_x);
  }
  block_sum(sums, shared);
  let_next_kernel_start();

  const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, kRmsFmaEps);
  float v[kRowLanes][1][kLaneValues];
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    unpack_lane(x[i], args.x.dtype, v[i][0]);
#pragma unroll
    for (int j = 0; j < kLaneValues; ++j) v[i][0][j] *= rstd;
  }
  finish<X, kQuantize>(args, rows.row, first_column(), lane_step(), v);
}

// Any sizes, dtypes and alignment: a block owns a row, writes its new x and reads that again from the caches, each
// thread what it wrote. One barrier.
template <bool kQuantize>
__global__ void __launch_bounds__(kScalarRowThreads)
    rms_fma_scalar_kernel(const __grid_constant__ RmsFmaArgs<Rows<3>> args) {
  __shared__ BlockSumShared<1> shared;
  wait_for_previous_kernel();
  const int64_t row = scalar_row();
  if (row >= args.to.rows) return;
  const int64_t x_row = args.rows.offset(0, row);
  const int64_t y_row = args.rows.offset(1, row);
  const int64_t z_row = args.rows.offset(2, row);

  float sums[1] = {0.0f};
  for (int64_t column = threadIdx.x * kLaneValues; column < args.to.hidden; column += blockDim.x * kLaneValues) {
    const int left = values_left(args.to.hidden, column);
    Lane<AnyTensor> x = load_lane<AnyTensor>(args.x, x_row + column, left);
    fused_multiply_add(load_lane<AnyTensor>(args.y, y_row + column, left).values,
                       load_lane<AnyTensor>(args.z, z_row + column, left).values, x.values);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      if (i < left) store_scalar(args.new_x, args.x.dtype, x_row + column + i, x.values[i]);
    }
    sums[0] += sum_of_squares(load_lane<AnyTensor>(args.x, x_row + column, left).values);
  }
  block_sum(sums, shared);
  let_next_kernel_start();

  const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, kRmsFmaEps);
  for (int64_t first = 0; first < args.to.hidden; first += blockDim.x * kLaneValues) {
    const int64_t column = first + threadIdx.x * kLaneValues;
    const int left = values_left(args.to.hidden, column);
    const Lane<AnyTensor> x = load_lane<AnyTensor>(args.x, x_row + column, left);
    float v[1][1][kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) v[0][0][i] = x.values[i] * rstd;
    finish<AnyTensor, kQuantize>(args, row, column, 0, v);
  }
}

template <bool kQuantize>
void launch(const char* op, const TensorView& x, const TensorView& y, const TensorView& z, const QuantizedRows& to,
            void* out, Stream stream) {
  if (to.rows == 0 || to.hidden == 0) return;
  const auto args_of = [&]<class RowsOfAll>(const RowsOfAll& rows) {
    return RmsFmaArgs<RowsOfAll>{.x = operand(x),
                                 .y = operand(y),
                                 .z = operand(z),
                                 .new_x = x.data,
                                 .rows = rows,
                                 .to = to,
                                 .out = static_cast<__nv_bfloat16*>(out),
                                 .hidden_inverse = 1.0f / static_cast<float>(to.hidden)};
  };
  const Rows<3> rows = make_rows<3>(x, {&x, &y, &z});
  const std::optional<RowGrid<3>> grid = row_grid<1, kRowLanes>(rows, to.hidden, kMaxThreads);
  if (grid && reads_lanes(x, to.hidden) && reads_lanes(y, to.hidden) && reads_lanes(z, to.hidden)) {
    with_float_type(x.dtype, [&]<class X>(std::type_identity<X>) {
      auto* kernel = rms_fma_kernel<X, AnyDtype, kQuantize>;
      if (y.dtype == x.dtype && z.dtype == x.dtype) kernel = rms_fma_kernel<X, X, kQuantize>;
      launch_overlapping(op, kernel, grid->blocks, grid->threads, x.device.index, stream, args_of(grid->rows));
    });
  } else {
    launch_overlapping(op, rms_fma_scalar_kernel<kQuantize>, scalar_row_blocks(op, to.rows), kScalarRowThreads,
                       x.device.index, stream, args_of(rows));
  }
}

}  // namespace

void rms_fma_cuda(const RmsFmaParams& params, Stream stream) {
  rms_fma_check(params);
  const QuantizedRows to{
      .q = nullptr, .scales = nullptr, .rows = params.x.num_rows(), .hidden = params.x.size(-1), .padded_rows = 0};
  launch<false>("rms_fma", params.x, params.y, params.z, to, params.out.data, stream);
}

void rms_fma_quantize_cuda(const RmsFmaQuantizeParams& params, Stream stream) {
  rms_fma_quantize_check(params);
  launch<true>("rms_fma_quantize", params.x, params.y, params.z, quantized_rows(params.q, params.scales), nullptr,
               stream);
}

}  // namespace ltx
