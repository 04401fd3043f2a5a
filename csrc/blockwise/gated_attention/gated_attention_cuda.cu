#include "blockwise/gated_attention/gated_attention.h"

#include "blockwise/quantize_block_cuda.h"
#include "common/cuda/sigmoid.h"
#include "common/rows.h"

// Tiles as blockwise/quantize_block_cuda.h has them: a thread loads its eight columns of four rows and their gates at
// once and holds them to the end. No barrier.
namespace ltx {

namespace {

template <class RowsOfBoth>
struct GatedAttentionArgs {
  Operand x;
  Operand gate_logits;
  RowsOfBoth rows;  // of x, gate_logits
  int64_t head_dim;
  QuantizedRows to;    // without scales its sizes alone
  __nv_bfloat16* out;  // [rows, hidden], used without scales
};

__device__ inline float gate_of(float logit) { return 2.0f * sigmoid_base2(logit * kLog2E); }

// Multiplies a lane whose first value is value in_head of the head whose logit is at `logit`.
__device__ inline void apply_gates(const Operand& gate_logits, int64_t logit, int64_t in_head, int64_t head_dim,
                                   int left, float (&v)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    if (i < left) v[i] *= gate_of(load_scalar(gate_logits.data, gate_logits.dtype, logit));
    if (++in_head == head_dim) {
      in_head = 0;
      ++logit;
    }
  }
}

template <class X, bool kQuantize, class RowsOfBoth>
__global__ void __launch_bounds__(kTileThreads)
    gated_attention_kernel(const __grid_constant__ GatedAttentionArgs<RowsOfBoth> args) {
  constexpr bool kLanes = !std::is_same_v<X, AnyTensor>;  // then a lane lies in one head
  const Tile<X> tile = locate_tile<X>(args.to.rows, args.to.hidden);
  wait_for_previous_kernel();
  int64_t x_offsets[kTileRows] = {};
  int64_t logits_offsets[kTileRows] = {};
  tile_offsets(args.rows, 0, tile, x_offsets);
  tile_offsets(args.rows, 1, tile, logits_offsets);
  const int64_t head =
      kLanes ? static_cast<uint32_t>(tile.column) / static_cast<uint32_t>(args.head_dim) : tile.column / args.head_dim;
  Lane<X> x[kTileRows] = {};
  uint32_t logits[kTileRows] = {};
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    if (r < tile.rows && tile.left > 0) x[r] = load_lane<X>(args.x, x_offsets[r] + tile.column, tile.left);
  }
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    if (kLanes && r < tile.rows && tile.left > 0) {
      logits[r] = load_bits(args.gate_logits.data, args.gate_logits.dtype, logits_offsets[r] + head);
    }
  }
  let_next_kernel_start();

  float v[1][kTileRows][kLaneValues];
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    unpack_lane(x[r], args.x.dtype, v[0][r]);
    if constexpr (kLanes) {
      const float gate = gate_of(decode_bits(logits[r], args.gate_logits.dtype));
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) v[0][r][i] *= gate;
    } else if (r < tile.rows) {
      apply_gates(args.gate_logits, logits_offsets[r] + head, tile.column - head * args.head_dim, args.head_dim,
                  tile.left, v[0][r]);
    }
  }
  if constexpr (kQuantize) {
    quantize_lanes<X>(args.to, tile.row, tile.rows, tile.column, 0, v);
  } else {
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (r < tile.rows) {
        Packed<__nv_bfloat16, kLaneValues> out;
        pack(v[0][r], out);
        store_lane<X>(args.out + (tile.row + r) * args.to.hidden + tile.column, tile.left, out);
      }
    }
  }
}

template <class X, class RowsOfBoth>
void launch(const GatedAttentionParams& params, const RowsOfBoth& rows, Stream stream) {
  constexpr const char* kOp = "gated_attention";
  QuantizedRows to = {
      .q = nullptr, .scales = nullptr, .rows = params.x.num_rows(), .hidden = params.x.size(-1), .padded_rows = 0};
  if (params.scales) to = quantized_rows(params.out, *params.scales);
  const GatedAttentionArgs<RowsOfBoth> args{.x = operand(params.x),
                                            .gate_logits = operand(params.gate_logits),
                                            .rows = rows,
                                            .head_dim = to.hidden / params.gate_logits.size(-1),
                                            .to = to,
                                            .out = static_cast<__nv_bfloat16*>(params.out.data)};
  auto* kernel = gated_attention_kernel<X, false, RowsOfBoth>;
  if (params.scales) kernel = gated_attention_kernel<X, true, RowsOfBoth>;
  const TileGrid grid = tile_grid(kOp, to.rows, to.hidden);
  launch_overlapping(kOp, kernel, grid.blocks, grid.threads, params.x.device.index, stream, args);
}

}  // namespace

void gated_attention_cuda(const GatedAttentionParams& params, Stream stream) {
  gated_attention_check(params);
  const int64_t hidden = params.x.size(-1);
  const Rows<2> rows = make_rows<2>(params.x, {&params.x, &params.gate_logits});
  if (rows.count == 0 || hidden == 0) return;
  const std::optional<ShortRows<2>> few = tile_rows(rows);
  const bool lanes = reads_lanes(params.x, hidden) && hidden / params.gate_logits.size(-1) % kLaneValues == 0;
  if (few && lanes) {
    with_float_type(params.x.dtype, [&]<class X>(std::type_identity<X>) { launch<X>(params, *few, stream); });
  } else {
    launch<AnyTensor>(params, rows, stream);
  }
}

}  // namespace ltx
