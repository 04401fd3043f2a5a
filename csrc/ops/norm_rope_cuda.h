#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "common/cuda/launch.h"
#include "common/cuda/norm_row.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector.h"
#include "common/rows.h"
#include "ops/norm_rope.h"

// The kernels of the ops that normalize a row and then rotate it. A room hands over its tensors as NormRopeTasks and
// says with a Layout which elements of a row are rotated together.
namespace ltx {

// One tensor to normalize and rotate.
struct NormRopeTask {
  const void* x;        // [rows, hidden]
  const void* cos;      // [rows, table values of a row]
  const void* sin;      // as cos
  const void* weights;  // [hidden], or null
  void* out;            // [rows, hidden]
  DType x_dtype;
  DType cos_dtype;
  DType sin_dtype;
  DType weights_dtype;
  DType out_dtype;
  int table_step;  // table values a pair if interleaved, 0 if split
  int64_t half;    // elements from a pair's first to its second: of a head; interleaved: of the row
  int64_t cos_head_stride;
  int64_t sin_head_stride;
  Rows<3> rows;  // of x, cos, sin
};

// What norm_rope_kernel is told of a task: its rows are [outer, inner], so that a block's indices are its row's.
struct NormRopeVectorTask {
  const void* x;
  const void* cos;
  const void* sin;
  const void* weights;
  void* out;
  int64_t x_outer_stride;
  int64_t x_inner_stride;
  int64_t cos_outer_stride;
  int64_t cos_inner_stride;
  int64_t sin_outer_stride;
  int64_t sin_inner_stride;
  int64_t cos_head_stride;
  int64_t sin_head_stride;
  uint32_t outer;
  uint32_t inner;
  int half;
};

template <int kTasks>
struct NormRopeVectorArgs {
  NormRopeVectorTask tasks[kTasks];
  int hidden;
  bool out_fp8;
  uint32_t units_per_head_inverse;  // see SplitLayout
  float hidden_inverse;
  float eps;
};

struct NormRopeScalarArgs {
  NormRopeTask tasks[2];
  int64_t hidden;
  int64_t first_row;  // of this launch: a grid holds 2^31 - 1 rows at most
  float eps;
};

inline constexpr int kVector = 8;          // elements that a thread loads at once
inline constexpr int kUnit = 2 * kVector;  // elements of x that a thread rotates together: a first and a second vector

// Where a unit's vectors lie in a row, where its table values lie, and what is rotated with what.
struct SplitLayout {
  static constexpr int kTableValues = kVector;  // of a unit, in each of kTableVectors vectors
  static constexpr int kTableVectors = 1;

  // unit / units_per_head is unit * ceil(2^22 / units_per_head) >> 22: exact for units up to 1023.
  static constexpr int kInverseBits = 22;

  int first;
  int second;
  int head;
  int in_head;

  __device__ SplitLayout(uint32_t units_per_head_inverse, const NormRopeVectorTask& task, int unit) {
    head = static_cast<int>(unit * units_per_head_inverse >> kInverseBits);
    first = unit * kVector + head * task.half;
    second = first + task.half;
    in_head = unit * kVector - head * task.half;
  }
  __device__ int64_t table_offset(int64_t head_stride, int) const { return head * head_stride + in_head; }

  __device__ static void rotate(float (&v)[2][kVector], const float (&cos)[1][kVector],
                                const float (&sin)[1][kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float v1 = v[0][i];
      const float v2 = v[1][i];
      v[0][i] = v1 * cos[0][i] - v2 * sin[0][i];
      v[1][i] = v2 * cos[0][i] + v1 * sin[0][i];
    }
  }
};

// kTableStep: 2 where tables hold a value an element, 1 where they hold one a pair. A unit is the vector at the same
// place in both halves of the row: neighbouring threads then read neighbouring 16 bytes.
template <int kTableStep>
struct InterleavedLayout {
  static constexpr int kTableValues = kVector / 2 * kTableStep;
  static constexpr int kTableVectors = 2;

  int first;
  int second;

  __device__ InterleavedLayout(uint32_t, const NormRopeVectorTask& task, int unit)
      : first(unit * kVector), second(first + task.half) {}
  __device__ int64_t table_offset(int64_t, int vector) const { return (vector == 0 ? first : second) / 2 * kTableStep; }

  __device__ static void rotate(float (&v)[2][kVector], const float (&cos)[2][kTableValues],
                                const float (&sin)[2][kTableValues]) {
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        const int even = i * kTableStep;
        const int odd = even + kTableStep - 1;
        const float v_even = v[vector][2 * i];
        const float v_odd = v[vector][2 * i + 1];
        v[vector][2 * i] = v_even * cos[vector][even] - v_odd * sin[vector][even];
        v[vector][2 * i + 1] = v_odd * cos[vector][odd] + v_even * sin[vector][odd];
      }
    }
  }
};

template <class X>
using RotatedOut = std::conditional_t<std::is_same_v<X, __half>, __half, __nv_bfloat16>;

// Ones where there are no weights. A choice of dtype at run time would hold the loads up: 8.7 against 8.0 us at 1024 x
// 4096 on an H200.
template <class Weight>
__device__ Packed<Weight, kVector> load_weights(const void* weights, int offset) {
  Packed<Weight, kVector> packed;
  constexpr float kOnes[kVector] = {1, 1, 1, 1, 1, 1, 1, 1};
  pack(kOnes, packed);
  if (weights != nullptr) packed = load<Weight, kVector>(static_cast<const Weight*>(weights) + offset);
  return packed;
}

template <class X>
__device__ void store_rotated(void* out, bool out_fp8, int64_t offset, const float (&v)[kVector]) {
  if (out_fp8) {
    Packed<__nv_fp8_e4m3, kVector> packed;
    pack(v, packed);
    store(static_cast<__nv_fp8_e4m3*>(out) + offset, packed);
  } else {
    Packed<RotatedOut<X>, kVector> packed;
    pack(v, packed);
    store(static_cast<RotatedOut<X>*>(out) + offset, packed);
  }
}

// Registers of a thread: what it needs to hold its packed values without spilling, and no more, so that many rows are
// in flight. 48 and 64 are five and four blocks of 256 threads a multiprocessor.
template <class X, class Table, class Weight, class Layout>
constexpr int registers() {
  constexpr int kPackedBytes = kUnit * static_cast<int>(sizeof(X) + sizeof(Weight)) +
                               2 * Layout::kTableVectors * Layout::kTableValues * static_cast<int>(sizeof(Table));
  return kPackedBytes <= 96 ? 48 : kPackedBytes <= 128 ? 64 : 128;
}
template <class X, class Table, class Weight, class Layout>
constexpr int max_threads() {
  return registers<X, Table, Weight, Layout>() <= 64 ? 1024 : 512;
}

// A block owns row (blockIdx.y, inner) of one tensor, a thread one unit of it. The thread issues all its loads at once,
// holds the values as they are in memory through the reduction (one barrier), then rotates and stores.
template <class X, class Table, class Weight, class Layout, int kTasks>
__device__ void norm_rope_row(const NormRopeVectorArgs<kTasks>& args, const NormRopeVectorTask& task, uint32_t inner,
                              BlockSumShared<1>& shared) {
  const uint32_t outer = blockIdx.y;
  if (outer >= task.outer || inner >= task.inner) return;
  const bool active = static_cast<int>(threadIdx.x) * kUnit < args.hidden;
  const Layout unit(args.units_per_head_inverse, task, active ? static_cast<int>(threadIdx.x) : 0);

  Packed<X, kVector> x[2] = {};
  Packed<Table, Layout::kTableValues> packed_cos[Layout::kTableVectors];
  Packed<Table, Layout::kTableValues> packed_sin[Layout::kTableVectors];
  Packed<Weight, kVector> packed_weights[2];
  if (active) {
    const X* x_row = static_cast<const X*>(task.x) + outer * task.x_outer_stride + inner * task.x_inner_stride;
    x[0] = load<X, kVector>(x_row + unit.first);
    x[1] = load<X, kVector>(x_row + unit.second);
    const Table* cos_row =
        static_cast<const Table*>(task.cos) + outer * task.cos_outer_stride + inner * task.cos_inner_stride;
    const Table* sin_row =
        static_cast<const Table*>(task.sin) + outer * task.sin_outer_stride + inner * task.sin_inner_stride;
#pragma unroll
    for (int vector = 0; vector < Layout::kTableVectors; ++vector) {
      packed_cos[vector] = load<Table, Layout::kTableValues>(cos_row + unit.table_offset(task.cos_head_stride, vector));
      packed_sin[vector] = load<Table, Layout::kTableValues>(sin_row + unit.table_offset(task.sin_head_stride, vector));
    }
    packed_weights[0] = load_weights<Weight>(task.weights, unit.first);
    packed_weights[1] = load_weights<Weight>(task.weights, unit.second);
  }

  float v[2][kVector];
  float sums[1] = {};
#pragma unroll
  for (int vector = 0; vector < 2; ++vector) {
    float partial = 0.0f;  // of each vector: two chains of additions in flight
    unpack(x[vector], v[vector]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) partial += v[vector][i] * v[vector][i];
    sums[0] += partial;
  }
  block_sum(sums, shared);
  let_next_kernel_start();
  if (!active) return;

  const float rstd = reciprocal_rms(sums[0], args.hidden_inverse, args.eps);
  float cos[Layout::kTableVectors][Layout::kTableValues];
  float sin[Layout::kTableVectors][Layout::kTableValues];
#pragma unroll
  for (int vector = 0; vector < Layout::kTableVectors; ++vector) {
    unpack(packed_cos[vector], cos[vector]);
    unpack(packed_sin[vector], sin[vector]);
  }
#pragma unroll
  for (int vector = 0; vector < 2; ++vector) {
    float weights[kVector];
    unpack(packed_weights[vector], weights);
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[vector][i] = v[vector][i] * rstd * weights[i];  // rstd * weights may overflow
  }
  Layout::rotate(v, cos, sin);
  const int64_t out_row = (static_cast<int64_t>(outer) * task.inner + inner) * args.hidden;
  store_rotated<X>(task.out, args.out_fp8, out_row + unit.first, v[0]);
  store_rotated<X>(task.out, args.out_fp8, out_row + unit.second, v[1]);
}

// kTasks is 1 or 2. Of two tasks the blocks alternate: q's and k's blocks of a row are scheduled together, so that what
// the second reads of a table that both share comes from the L2 cache.
template <class X, class Table, class Weight, class Layout, int kTasks>
__global__ void __maxnreg__((registers<X, Table, Weight, Layout>()))
    norm_rope_kernel(const __grid_constant__ NormRopeVectorArgs<kTasks> args) {
  __shared__ BlockSumShared<1> shared;
  wait_for_previous_kernel();
  // Each task by a constant index: its fields are then operands of the instructions, not loads.
  if (blockIdx.x % kTasks == 0) {
    norm_rope_row<X, Table, Weight, Layout>(args, args.tasks[0], blockIdx.x / kTasks, shared);
  } else {
    norm_rope_row<X, Table, Weight, Layout>(args, args.tasks[kTasks - 1], blockIdx.x / kTasks, shared);
  }
}

// Any sizes, dtypes and alignment, value by value: for what norm_rope_kernel does not take. A block owns one row of one
// tensor and reads it twice, the second time from the caches. One barrier.
static __global__ void __launch_bounds__(512) norm_rope_scalar_kernel(const __grid_constant__ NormRopeScalarArgs args) {
  const NormRopeTask& task = args.tasks[blockIdx.y];
  const int64_t row = args.first_row + blockIdx.x;
  if (row >= task.rows.count) return;
  const int64_t x_row = task.rows.offset(0, row);

  float sums[1] = {0.0f};
  for (int64_t i = threadIdx.x; i < args.hidden; i += blockDim.x) {
    const float value = load_scalar(task.x, task.x_dtype, x_row + i);
    sums[0] += value * value;
  }
  __shared__ BlockSumShared<1> shared;
  block_sum(sums, shared);
  const float rstd = reciprocal_rms(sums[0], 1.0f / static_cast<float>(args.hidden), args.eps);

  const bool split = task.table_step == 0;
  for (int64_t pair = threadIdx.x; pair < args.hidden / 2; pair += blockDim.x) {
    const int64_t head = split ? pair / task.half : 0;
    const int64_t in_head = pair - head * task.half;
    const int64_t first = split ? head * 2 * task.half + in_head : 2 * pair;
    const int64_t second = split ? first + task.half : first + 1;
    const int64_t first_angle = split ? in_head : pair * task.table_step;
    const int64_t second_angle = task.table_step == 2 ? first_angle + 1 : first_angle;
    const int64_t cos_row = task.rows.offset(1, row) + head * task.cos_head_stride;
    const int64_t sin_row = task.rows.offset(2, row) + head * task.sin_head_stride;

    float v1 = load_scalar(task.x, task.x_dtype, x_row + first) * rstd;
    float v2 = load_scalar(task.x, task.x_dtype, x_row + second) * rstd;
    if (task.weights != nullptr) {
      v1 *= load_scalar(task.weights, task.weights_dtype, first);
      v2 *= load_scalar(task.weights, task.weights_dtype, second);
    }
    const float y1 = v1 * load_scalar(task.cos, task.cos_dtype, cos_row + first_angle) -
                     v2 * load_scalar(task.sin, task.sin_dtype, sin_row + first_angle);
    const float y2 = v2 * load_scalar(task.cos, task.cos_dtype, cos_row + second_angle) +
                     v1 * load_scalar(task.sin, task.sin_dtype, sin_row + second_angle);
    store_scalar(task.out, task.out_dtype, row * args.hidden + first, y1);
    store_scalar(task.out, task.out_dtype, row * args.hidden + second, y2);
  }
}

// What a room hands over: one task, or those of q and k.
struct NormRopeArgs {
  NormRopeTask tasks[2];
  int num_tasks;
  bool vectors;  // norm_rope_kernel can read all tensors
  int64_t hidden;
  float eps;
  int device;
};

inline int64_t max_rows(const NormRopeArgs& args) {
  return std::max(args.tasks[0].rows.count, args.num_tasks > 1 ? args.tasks[1].rows.count : 0);
}

inline NormRopeTask make_task(const NormRopeParams& params, const Rows<3>& rows, int64_t half, int table_step) {
  return {.x = params.x.data,
          .cos = params.cos_freqs.data,
          .sin = params.sin_freqs.data,
          .weights = params.weights ? params.weights->data : nullptr,
          .out = params.out.data,
          .x_dtype = params.x.dtype,
          .cos_dtype = params.cos_freqs.dtype,
          .sin_dtype = params.sin_freqs.dtype,
          .weights_dtype = params.weights ? params.weights->dtype : DType::kFloat32,
          .out_dtype = params.out.dtype,
          .table_step = table_step,
          .half = half,
          .cos_head_stride = table_step == 0 ? params.cos_freqs.stride(1) : 0,
          .sin_head_stride = table_step == 0 ? params.sin_freqs.stride(1) : 0,
          .rows = rows};
}

// Whether norm_rope_kernel can read the tensors in vectors, table_values at a time from the tables.
inline bool reads_vectors(const NormRopeParams& params, int table_values) {
  const int64_t table_bytes = std::min<int64_t>(16, table_values * size_of(params.cos_freqs.dtype));
  return params.x.size(-1) % kUnit == 0 && is_aligned(params.x, 16) && is_aligned(params.cos_freqs, table_bytes) &&
         is_aligned(params.sin_freqs, table_bytes) && (!params.weights || is_aligned(*params.weights, 16));
}

inline NormRopeVectorTask vector_task(const NormRopeTask& task) {
  const auto outer_stride = [&task](int tensor) { return task.rows.rank == 2 ? task.rows.strides[tensor][0] : 0; };
  const auto inner_stride = [&task](int tensor) {
    return task.rows.rank > 0 ? task.rows.strides[tensor][task.rows.rank - 1] : 0;
  };
  return {.x = task.x,
          .cos = task.cos,
          .sin = task.sin,
          .weights = task.weights,
          .out = task.out,
          .x_outer_stride = outer_stride(0),
          .x_inner_stride = inner_stride(0),
          .cos_outer_stride = outer_stride(1),
          .cos_inner_stride = inner_stride(1),
          .sin_outer_stride = outer_stride(2),
          .sin_inner_stride = inner_stride(2),
          .cos_head_stride = task.cos_head_stride,
          .sin_head_stride = task.sin_head_stride,
          .outer = static_cast<uint32_t>(task.rows.rank == 2 ? task.rows.sizes[0] : 1),
          .inner = static_cast<uint32_t>(task.rows.rank > 0 ? task.rows.sizes[task.rows.rank - 1] : 1),
          .half = static_cast<int>(task.half)};
}

// One launch for all tasks; false where they differ in what the kernel takes as one, or do not fit a grid or a block.
template <class X, class Table, class Weight, class Layout, int kTasks>
bool launch_vectors(const char* op, const NormRopeArgs& args, Stream stream) {
  constexpr int64_t kMaxGridX = 0x7FFFFFFF;
  constexpr int64_t kMaxGridY = 0xFFFF;
  const int64_t threads = (args.hidden / kUnit + kWarpSize - 1) / kWarpSize * kWarpSize;
  if (threads > max_threads<X, Table, Weight, Layout>()) return false;

  NormRopeVectorArgs<kTasks> vector_args{.tasks = {},
                                         .hidden = static_cast<int>(args.hidden),
                                         .out_fp8 = args.tasks[0].out_dtype == DType::kFp8,
                                         .units_per_head_inverse = 0,
                                         .hidden_inverse = 1.0f / static_cast<float>(args.hidden),
                                         .eps = args.eps};
  int64_t inner = 0;
  int64_t outer = 0;
  for (int i = 0; i < kTasks; ++i) {
    const Rows<3>& rows = args.tasks[i].rows;
    if (rows.rank > 2 || args.tasks[i].half != args.tasks[0].half) return false;
    inner = std::max(inner, rows.rank > 0 ? rows.sizes[rows.rank - 1] : 1);
    outer = std::max(outer, rows.rank == 2 ? rows.sizes[0] : 1);
    if (inner > kMaxGridX / kTasks || outer > kMaxGridY) return false;
    vector_args.tasks[i] = vector_task(args.tasks[i]);
  }
  const int64_t units_per_head = args.tasks[0].half / kVector;
  vector_args.units_per_head_inverse =
      static_cast<uint32_t>(((1 << SplitLayout::kInverseBits) + units_per_head - 1) / units_per_head);

  const dim3 grid(static_cast<unsigned>(inner * kTasks), static_cast<unsigned>(outer));
  launch_overlapping(op, norm_rope_kernel<X, Table, Weight, Layout, kTasks>, grid, static_cast<int>(threads),
                     args.device, stream, vector_args);
  return true;
}

template <class X, class Table, class Weight, class Layout>
bool launch_vectors(const char* op, const NormRopeArgs& args, Stream stream) {
  return args.num_tasks == 1 ? launch_vectors<X, Table, Weight, Layout, 1>(op, args, stream)
                             : launch_vectors<X, Table, Weight, Layout, 2>(op, args, stream);
}

// False if there is no instance for the dtypes, or none that takes these rows.
template <class Layout>
bool launch_vectors(const char* op, const NormRopeArgs& args, Stream stream) {
  const auto is = [&args](DType x, DType table, DType weight) {
    return std::all_of(args.tasks, args.tasks + args.num_tasks, [&](const NormRopeTask& task) {
      return task.x_dtype == x && task.cos_dtype == table && task.sin_dtype == table &&
             (task.weights == nullptr || task.weights_dtype == weight);
    });
  };
  using enum DType;
  using BFloat16 = __nv_bfloat16;
  if (is(kBFloat16, kBFloat16, kBFloat16))
    return launch_vectors<BFloat16, BFloat16, BFloat16, Layout>(op, args, stream);
  if (is(kBFloat16, kBFloat16, kFloat32)) return launch_vectors<BFloat16, BFloat16, float, Layout>(op, args, stream);
  if (is(kBFloat16, kFloat32, kBFloat16)) return launch_vectors<BFloat16, float, BFloat16, Layout>(op, args, stream);
  if (is(kBFloat16, kFloat32, kFloat32)) return launch_vectors<BFloat16, float, float, Layout>(op, args, stream);
  if (is(kFloat16, kFloat16, kFloat16)) return launch_vectors<__half, __half, __half, Layout>(op, args, stream);
  if (is(kFloat32, kFloat32, kFloat32)) return launch_vectors<float, float, float, Layout>(op, args, stream);
  return false;
}

inline void launch_scalar(const char* op, const NormRopeArgs& args, Stream stream) {
  constexpr unsigned kThreads = 512;
  constexpr int64_t kMaxGridX = 0x7FFFFFFF;
  NormRopeScalarArgs scalar_args{
      .tasks = {args.tasks[0], args.tasks[1]}, .hidden = args.hidden, .first_row = 0, .eps = args.eps};
  const int64_t rows = max_rows(args);
  for (; scalar_args.first_row < rows; scalar_args.first_row += kMaxGridX) {
    const dim3 grid(static_cast<unsigned>(std::min(rows - scalar_args.first_row, kMaxGridX)),
                    static_cast<unsigned>(args.num_tasks));
    norm_rope_scalar_kernel<<<grid, kThreads, 0, stream>>>(scalar_args);
    LTX_CUDA_CHECK(cudaGetLastError(), op);
  }
}

}  // namespace ltx
