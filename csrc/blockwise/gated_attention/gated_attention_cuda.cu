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

// Multiplies the lane at `column` by the gates of its heads.
template <class Args>
__device__ void apply_gates(const Args& args, int64_t logits_row, int64_t column, float (&v)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    if (column + i < args.to.hidden) {
      const int64_t head = (column + i) / args.head_dim;
      v[i] *= gate_of(load_scalar(args.gate_logits.data, args.gate_logits.dtype, logits_row + head));
    }
  }
}

template <class X, bool kQuantize, class RowsOfBoth>
__global__ void __launch_bounds__(kTileThreads)
    gated_attention_kernel(const __grid_constant__ GatedAttentionArgs<RowsOfBoth> args) {
  constexpr bool kLanes = !std::is_same_v<X, AnyTensor>;  // then a lane lies in one head
  const TilePosition at = tile_position();
  const int64_t left = args.to.hidden - at.column;
  wait_for_previous_kernel();
  Lane<X> x[kTileRows] = {};
  uint32_t logits[kTileRows] = {};
  if (left > 0) {
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (at.row + r < args.to.rows) {
        x[r] = load_lane<X>(args.x, args.rows.offset(0, at.row + r) + at.column, left);
      }
    }
    if constexpr (kLanes) {
      const int64_t head = static_cast<uint32_t>(at.column) / static_cast<uint32_t>(args.head_dim);
#pragma unroll
      for (int r = 0; r < kTileRows; ++r) {
        if (at.row + r < args.to.rows) {
          const int64_t offset = args.rows.offset(1, at.row + r) + head;
          logits[r] = load_bits(args.gate_logits.data, args.gate_logits.dtype, offset);
        }
      }
    }
  }
  let_next_kernel_start();

  float v[kTileRows][kLaneValues];
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    unpack_lane(x[r], args.x.dtype, v[r]);
    if constexpr (kLanes) {
      const float gate = gate_of(decode_bits(logits[r], args.gate_logits.dtype));
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) v[r][i] *= gate;
    } else if (at.row + r < args.to.rows) {
      apply_gates(args, args.rows.offset(1, at.row + r), at.column, v[r]);
    }
  }
  if constexpr (kQuantize) {
    quantize_lanes<X>(args.to, at.row, at.column, v);
  } else {
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (at.row + r < args.to.rows) {
        Packed<__nv_bfloat16, kLaneValues> out;
        pack(v[r], out);
        store_lane<X>(args.out, (at.row + r) * args.to.hidden + at.column, left, out);
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
  const std::optional<ShortRows<2>> few = short_rows(rows);
  const bool lanes = reads_lanes(params.x, hidden) && hidden / params.gate_logits.size(-1) % kLaneValues == 0;
  if (few && lanes && hidden >> 32 == 0) {
    with_float_type(params.x.dtype, [&]<class X>(std::type_identity<X>) { launch<X>(params, *few, stream); });
  } else {
    launch<AnyTensor>(params, rows, stream);
  }
}

}  // namespace ltx
