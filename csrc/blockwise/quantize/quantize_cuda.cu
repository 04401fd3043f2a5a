#include "blockwise/quantize/quantize.h"

#include "blockwise/quantize_block_cuda.h"
#include "common/cuda/sigmoid.h"
#include "common/rows.h"

// Tiles as blockwise/quantize_block_cuda.h has them: a thread loads its eight columns of four rows at once and holds
// them to the end. No barrier.
namespace ltx {

namespace {

template <class RowsOfX>
struct QuantizeArgs {
  Operand x;
  RowsOfX rows;
  QuantizedRows to;
};

template <Gelu kGelu>
__device__ float apply_gelu(float x) {
  if constexpr (kGelu == Gelu::kTanh) {
    constexpr float kLinear = 2 * 0.7978845608f * kLog2E;
    return x * sigmoid_base2(x * __fmaf_rn(x * x, kLinear * 0.044715f, kLinear));
  } else if constexpr (kGelu == Gelu::kSigmoid) {
    return x * sigmoid_base2(x * (1.702f * kLog2E));
  } else {
    return x;
  }
}

template <class X, Gelu kGelu, class RowsOfX>
__global__ void __launch_bounds__(kTileThreads) quantize_kernel(const __grid_constant__ QuantizeArgs<RowsOfX> args) {
  const Tile<X> tile = locate_tile<X>(args.to.rows, args.to.hidden);
  wait_for_previous_kernel();
  int64_t offsets[kTileRows] = {};
  tile_offsets(args.rows, 0, tile, offsets);
  Lane<X> x[kTileRows] = {};
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    if (r < tile.rows && tile.left > 0) x[r] = load_lane<X>(args.x, offsets[r] + tile.column, tile.left);
  }
  let_next_kernel_start();

  float v[1][kTileRows][kLaneValues];
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    unpack_lane(x[r], args.x.dtype, v[0][r]);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) v[0][r][i] = apply_gelu<kGelu>(v[0][r][i]);
  }
  quantize_lanes<X>(args.to, tile.row, tile.rows, tile.column, 0, v);
}

template <class X, class RowsOfX>
void launch(const QuantizeParams& params, const RowsOfX& rows, Stream stream) {
  constexpr const char* kOp = "quantize";
  const QuantizeArgs<RowsOfX> args{.x = operand(params.x), .rows = rows, .to = quantized_rows(params.q, params.scales)};
  auto* kernel = quantize_kernel<X, Gelu::kNone, RowsOfX>;
  if (params.gelu == Gelu::kTanh) kernel = quantize_kernel<X, Gelu::kTanh, RowsOfX>;
  if (params.gelu == Gelu::kSigmoid) kernel = quantize_kernel<X, Gelu::kSigmoid, RowsOfX>;
  const TileGrid grid = tile_grid(kOp, args.to.rows, args.to.hidden);
  launch_overlapping(kOp, kernel, grid.blocks, grid.threads, params.x.device.index, stream, args);
}

}  // namespace

void quantize_cuda(const QuantizeParams& params, Stream stream) {
  quantize_check(params);
  const int64_t hidden = params.x.size(-1);
  const Rows<1> rows = make_rows<1>(params.x, {&params.x});
  if (rows.count == 0 || hidden == 0) return;
  const std::optional<ShortRows<1>> few = tile_rows(rows);
  if (few && reads_lanes(params.x, hidden)) {
    with_float_type(params.x.dtype, [&]<class X>(std::type_identity<X>) { launch<X>(params, *few, stream); });
  } else {
    launch<AnyTensor>(params, rows, stream);
  }
}

}  // namespace ltx
