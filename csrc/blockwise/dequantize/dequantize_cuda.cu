#include "blockwise/dequantize/dequantize.h"

#include "blockwise/quantize_block_cuda.h"
#include "common/rows.h"

// Tiles as blockwise/quantize_block_cuda.h has them: a thread loads its eight values of four rows and their scales at
// once, before it uses any. No barrier.
namespace ltx {

namespace {

template <class RowsOfOne>
struct DequantizeArgs {
  Operand q;
  Operand scales;
  __nv_bfloat16* out;
  RowsOfOne q_rows;
  RowsOfOne scale_rows;
  int64_t rows;
  int64_t hidden;
  int64_t scale_block_stride;  // from a block of a row to the next
  int64_t scale_row_stride;    // of tiles of weights
};

// Every NaN becomes the one that the contract names.
__device__ inline Packed<__nv_bfloat16, kLaneValues> round_to_bfloat16(const float (&values)[kLaneValues]) {
  constexpr uint32_t kNan = kQuietNanBits >> 16;
  Packed<__nv_bfloat16, kLaneValues> packed;
  pack(values, packed);
#pragma unroll
  for (int i = 0; i < kLaneValues / 2; ++i) {
    uint32_t& word = packed.words[i];
    if (isnan(values[2 * i])) word = (word & 0xFFFF0000) | kNan;
    if (isnan(values[2 * i + 1])) word = (word & 0xFFFF) | kNan << 16;
  }
  return packed;
}

// kWeights: a scale has 128 rows, so that those of a tile share it.
template <class Q, bool kWeights, class RowsOfOne>
__global__ void __launch_bounds__(kTileThreads)
    dequantize_kernel(const __grid_constant__ DequantizeArgs<RowsOfOne> args) {
  const Tile<Q> tile = locate_tile<Q>(args.rows, args.hidden);
  wait_for_previous_kernel();
  int64_t q_offsets[kTileRows] = {};
  int64_t scale_offsets[kTileRows] = {};
  tile_offsets(args.q_rows, 0, tile, q_offsets);
  if constexpr (kWeights) {
    const int64_t offset = tile.row / kBlockSize * args.scale_row_stride;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) scale_offsets[r] = offset;
  } else {
    tile_offsets(args.scale_rows, 0, tile, scale_offsets);
  }
  const int64_t block_offset = static_cast<uint64_t>(tile.column) / kBlockSize * args.scale_block_stride;
  Lane<Q> q[kTileRows] = {};
  uint32_t scales[kTileRows] = {};
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    if (r < tile.rows && tile.left > 0) q[r] = load_lane<Q>(args.q, q_offsets[r] + tile.column, tile.left);
  }
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    if (r < tile.rows && tile.left > 0) {
      scales[r] = load_bits(args.scales.data, args.scales.dtype, scale_offsets[r] + block_offset);
    }
  }
  let_next_kernel_start();

#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    float values[kLaneValues];
    unpack_lane(q[r], args.q.dtype, values);
    const float scale = decode_bits(scales[r], args.scales.dtype);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) values[i] = __fmul_rn(values[i], scale);
    if (r < tile.rows) {
      store_lane<Q>(args.out + (tile.row + r) * args.hidden + tile.column, tile.left, round_to_bfloat16(values));
    }
  }
}

template <bool kWeights>
void launch(const char* op, const TensorView& q, const TensorView& scales, const TensorView& out, Stream stream) {
  const int64_t hidden = q.size(-1);
  const Rows<1> q_rows = make_rows<1>(q, {&q});
  const Rows<1> scale_rows = make_rows<1>(scales, {&scales});
  if (q_rows.count == 0 || hidden == 0) return;
  const TileGrid grid = tile_grid(op, q_rows.count, hidden);
  const auto launch_with = [&]<class Q, class RowsOfOne>(std::type_identity<Q>, const RowsOfOne& q_rows_,
                                                         const RowsOfOne& scale_rows_) {
    const DequantizeArgs<RowsOfOne> args{.q = operand(q),
                                         .scales = operand(scales),
                                         .out = static_cast<__nv_bfloat16*>(out.data),
                                         .q_rows = q_rows_,
                                         .scale_rows = scale_rows_,
                                         .rows = q_rows.count,
                                         .hidden = hidden,
                                         .scale_block_stride = scales.stride(-1),
                                         .scale_row_stride = kWeights ? scales.stride(0) : 0};
    launch_overlapping(op, dequantize_kernel<Q, kWeights, RowsOfOne>, grid.blocks, grid.threads, q.device.index, stream,
                       args);
  };
  const std::optional<ShortRows<1>> few_q = tile_rows(q_rows);
  const std::optional<ShortRows<1>> few_scales = kWeights ? ShortRows<1>{} : tile_rows(scale_rows);
  if (few_q && few_scales && hidden % kLaneValues == 0 && hidden <= kMaxLaneHidden && is_aligned(q, kLaneValues)) {
    launch_with(std::type_identity<__nv_fp8_e4m3>(), *few_q, *few_scales);
  } else {
    launch_with(std::type_identity<AnyTensor>(), q_rows, scale_rows);
  }
}

}  // namespace

void dequantize_cuda(const DequantizeParams& params, Stream stream) {
  dequantize_check(params);
  launch<false>("dequantize", params.q, params.scales, params.out, stream);
}

void dequantize_weights_cuda(const DequantizeWeightsParams& params, Stream stream) {
  dequantize_weights_check(params);
  launch<true>("dequantize_weights", params.q, params.scales, params.out, stream);
}

}  // namespace ltx
