#include "blockwise/fp8_gemm/fp8_gemm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "blockwise/fp8_gemm/fp8_gemm_block.h"
#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/float_row.h"
#include "common/fp8.h"
#include "common/parallel_for.h"

namespace ltx {

namespace {

constexpr const char* kOp = "fp8_gemm";

void check_multiple(const char* name, const TensorView& view, int dim, int64_t factor) {
  LTX_CHECK(view.size(dim) > 0 && view.size(dim) % factor == 0,
            std::string(kOp) + ": " + name + " must have a " + (dim == 0 ? "first" : "last") +
                " size that is a positive multiple of " + std::to_string(factor) + ", got " + shape_of(view));
}

// What TMA and asynchronous copies ask of a matrix of bytes.
void check_alignment(const char* name, const TensorView& view) {
  constexpr int64_t kAlignment = 16;
  LTX_CHECK(view.size(0) <= 1 || view.stride(0) % kAlignment == 0,
            std::string(kOp) + ": " + name + " must have a row stride that is a multiple of 16 on a GPU, got " +
                std::to_string(view.stride(0)));
  const uintptr_t address = reinterpret_cast<uintptr_t>(view.data);
  LTX_CHECK(view.size(0) == 0 || address % kAlignment == 0,
            std::string(kOp) + ": " + name + " must start at a multiple of 16 bytes on a GPU, got an address " +
                std::to_string(address % kAlignment) + " bytes past one");
}

void check_cuda(const Fp8GemmParams& params) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;  // coordinates are 32-bit, also those of a last tile's end
  for (const auto& [name, view] : {std::pair{"a", params.a}, std::pair{"b", params.b}}) {
    LTX_CHECK(view.size(0) <= kMaxSize && view.size(1) <= kMaxSize,
              std::string(kOp) + ": " + name + " must have sizes of at most 2^30 on a GPU, got " + shape_of(view));
  }
  check_alignment("a", params.a);
  if (params.b.dtype == DType::kFp8) check_alignment("b", params.b);
  if (!params.config) return;
  const Fp8GemmConfig& config = *params.config;
  const auto candidates = fp8_gemm_candidates(config.arch);
  const bool known = std::ranges::find(candidates, config, &Fp8GemmCandidate::config) != candidates.end();
  LTX_CHECK(known && fp8_gemm_config_fits(config, params.a.size(1)),
            std::string(kOp) + ": config must be one that gemm_config could return for this k, got another");
}

// Scales have any strides, so their elements are loaded one by one: few, beside the products that share them.
float load_element(const TensorView& view, int64_t offset) {
  float value;
  load_row(view, offset, 1, &value);
  return value;
}

float load_scale(const TensorView& scales, int64_t row, int64_t column) {
  return load_element(scales, row * scales.stride(0) + column * scales.stride(1));
}

struct Tile {
  alignas(64) float acc[kTileRows * kTileColumns];
  Fp8GemmScratch scratch;
};

struct TileBounds {
  int64_t first_row;
  int64_t first_column;
  int64_t rows;
  int64_t columns;
};

// acc += sums * (a_scales * b_scales), for all k blocks
void accumulate(const Fp8GemmParams& params, const TileBounds& bounds, const Fp8GemmBlockKernel& kernel, Tile& tile) {
  const int64_t k = params.a.size(1);
  const bool b_is_fp6 = params.b.dtype == DType::kUint8;
  Fp8GemmBlock block{
      .a = static_cast<const uint8_t*>(params.a.data) + bounds.first_row * params.a.stride(0),
      .a_stride = params.a.stride(0),
      .rows = bounds.rows,
      .b = static_cast<const uint8_t*>(params.b.data) + bounds.first_column * params.b.stride(0),
      .b_stride = params.b.stride(0),
      .columns = bounds.columns,
      .b_is_fp6 = b_is_fp6,
      .depth = 0,
  };
  std::fill(tile.acc, tile.acc + bounds.rows * kTileColumns, 0.0f);
  for (int64_t k_block = 0; k_block < num_blocks(k); ++k_block) {
    block.depth = std::min(kTileDepth, k - k_block * kTileDepth);
    kernel.sum(block, tile.scratch);
    const float b_scale = load_scale(params.b_scales, bounds.first_column / kBlockSize, k_block);
    for (int64_t row = 0; row < bounds.rows; ++row) {
      const float scale = load_scale(params.a_scales, bounds.first_row + row, k_block) * b_scale;
      float* acc = tile.acc + row * kTileColumns;
      const float* sums = tile.scratch.sums + row * kTileColumns;
      for (int64_t column = 0; column < bounds.columns; ++column) acc[column] += sums[column] * scale;
    }
    block.a += kTileDepth;
    block.b += b_is_fp6 ? kTileDepth * 3 / 4 : kTileDepth;
  }
}

// out = round((acc + bias) + residual)
void finish(const Fp8GemmParams& params, const TileBounds& bounds, Tile& tile) {
  float bias[kTileColumns] = {};
  for (int64_t column = 0; params.bias && column < bounds.columns; ++column) {
    bias[column] = load_element(*params.bias, (bounds.first_column + column) * params.bias->stride(0));
  }
  float residual[kTileColumns] = {};
  for (int64_t row = 0; row < bounds.rows; ++row) {
    const int64_t out_row = bounds.first_row + row;
    if (params.residual) {
      load_row(*params.residual, out_row * params.residual->stride(0) + bounds.first_column, bounds.columns, residual);
    }
    float* acc = tile.acc + row * kTileColumns;
    for (int64_t column = 0; column < bounds.columns; ++column) {
      const float sum = (acc[column] + bias[column]) + residual[column];
      acc[column] = std::isnan(sum) ? std::bit_cast<float>(kQuietNanBits) : sum;
    }
    store_row(params.out, out_row * params.out.size(1) + bounds.first_column, bounds.columns, acc);
  }
}

}  // namespace

void fp8_gemm_check(const Fp8GemmParams& params) {
  const TensorView& a = params.a;
  const TensorView& b = params.b;
  check_device(kOp, "a", a, a.device, "a");
  check_device(kOp, "a_scales", params.a_scales, a.device, "a");
  check_device(kOp, "b", b, a.device, "a");
  check_device(kOp, "b_scales", params.b_scales, a.device, "a");
  if (params.bias) check_device(kOp, "bias", *params.bias, a.device, "a");
  if (params.residual) check_device(kOp, "residual", *params.residual, a.device, "a");

  check_dtype(kOp, "a", a, {DType::kFp8});
  check_float_dtype(kOp, "a_scales", params.a_scales);
  check_dtype(kOp, "b", b, {DType::kFp8, DType::kUint8});
  check_float_dtype(kOp, "b_scales", params.b_scales);
  if (params.bias) check_dtype(kOp, "bias", *params.bias, {DType::kFloat32});
  TensorView out;
  out.dtype = params.out_dtype;
  check_float_dtype(kOp, "out_dtype", out);
  if (params.residual) check_dtype(kOp, "residual", *params.residual, {params.out_dtype});

  check_rank(kOp, "a", a, 2);
  check_rank(kOp, "b", b, 2);
  check_multiple("a", a, 1, 16);
  check_multiple("b", b, 0, 8);
  const int64_t m = a.size(0);
  const int64_t n = b.size(0);
  const int64_t k = a.size(1);
  const bool b_is_fp6 = b.dtype == DType::kUint8;
  LTX_CHECK(b.size(1) == (b_is_fp6 ? k / 4 * 3 : k),
            std::string(kOp) + ": b must have a last size of " +
                (b_is_fp6 ? std::to_string(k / 4 * 3) + ", 3/4 of a's " + std::to_string(k) + " (uint8 is packed fp6)"
                          : std::to_string(k) + " like a") +
                ", got " + shape_of(b));
  check_shape(kOp, "a_scales", params.a_scales, {m, num_blocks(k)});
  check_shape(kOp, "b_scales", params.b_scales, {num_blocks(n), num_blocks(k)});
  if (params.bias) check_shape(kOp, "bias", *params.bias, {n});
  if (params.residual) check_shape(kOp, "residual", *params.residual, {m, n});

  check_last_contiguous(kOp, "a", a);
  check_last_contiguous(kOp, "b", b);
  if (params.residual) check_last_contiguous(kOp, "residual", *params.residual);
  if (a.device.kind == Device::Kind::kCuda) check_cuda(params);
}

bool fp8_gemm_reads_scales(const TensorView& a_scales) {
  const int64_t m = a_scales.size(0);
  return a_scales.dtype == DType::kFloat32 && reinterpret_cast<uintptr_t>(a_scales.data) % 16 == 0 &&
         (m <= 1 || a_scales.stride(0) == 1) &&
         (a_scales.size(1) == 1 || (a_scales.stride(1) >= m && a_scales.stride(1) % 4 == 0));
}

bool fp8_gemm_reads_bias(const TensorView& bias) {
  return bias.stride(0) == 1 && reinterpret_cast<uintptr_t>(bias.data) % 8 == 0;
}

int64_t fp8_gemm_workspace_bytes(const Fp8GemmParams& params) {
  const int64_t m = params.a.size(0);
  const int64_t k = params.a.size(1);
  if (params.a.device.kind != Device::Kind::kCuda || m == 0) return 0;
  const int64_t n = params.b.size(0);
  const int64_t b_bytes = params.b.dtype == DType::kUint8 ? n * k : 0;
  const int64_t scale_bytes = fp8_gemm_reads_scales(params.a_scales) ? 0 : num_blocks(k) * padded_rows(m) * 4;
  const int64_t bias_bytes = !params.bias || fp8_gemm_reads_bias(*params.bias) ? 0 : n * 4;
  return b_bytes + scale_bytes + bias_bytes;
}

void fp8_gemm_cpu(const Fp8GemmParams& params) { fp8_gemm_cpu_by(fp8_gemm_block_kernels().front(), params); }

void fp8_gemm_cpu_by(const Fp8GemmBlockKernel& kernel, const Fp8GemmParams& params) {
  fp8_gemm_check(params);
  const int64_t m = params.a.size(0);
  const int64_t n = params.b.size(0);
  const int64_t row_tiles = (m + kTileRows - 1) / kTileRows;
  const int64_t column_tiles = num_blocks(n);
  parallel_for(row_tiles * column_tiles, m * n * params.a.size(1), [&](int64_t begin, int64_t end) {
    const auto tile = std::make_unique_for_overwrite<Tile>();
    for (int64_t index = begin; index < end; ++index) {
      const int64_t first_row = index / column_tiles * kTileRows;
      const int64_t first_column = index % column_tiles * kTileColumns;
      const TileBounds bounds{.first_row = first_row,
                              .first_column = first_column,
                              .rows = std::min(kTileRows, m - first_row),
                              .columns = std::min(kTileColumns, n - first_column)};
      accumulate(params, bounds, kernel, *tile);
      finish(params, bounds, *tile);
    }
  });
}

}  // namespace ltx
