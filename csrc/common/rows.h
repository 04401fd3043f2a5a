#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "common/tensor.h"

// A row is what one setting of all leading indices selects. Rows walks the rows of several tensors together: `row`
// counts over the common (broadcast) leading sizes, and offset() says where a tensor has that row.
namespace ltx {

template <int kTensors>
struct Rows {
  int64_t count = 1;
  int rank = 0;  // leading dimensions left after merging those that are evenly spaced in every tensor
  std::array<int64_t, kMaxRank> sizes = {};
  std::array<std::array<int64_t, kMaxRank>, kTensors> strides = {};  // 0 where a tensor is broadcast

  // In elements. For host and device: nvcc compiles constexpr functions for both.
  constexpr int64_t offset(int tensor, int64_t row) const {
    int64_t offset = 0;
    for (int dim = rank - 1; dim > 0; --dim) {
      const int64_t rest = divide(row, sizes[dim]);
      offset += (row - rest * sizes[dim]) * strides[tensor][dim];
      row = rest;
    }
    return rank > 0 ? offset + row * strides[tensor][0] : 0;
  }

  // Appends a dimension, from the outermost in; merges it with the one before where all strides allow.
  constexpr void append(int64_t size, const std::array<int64_t, kTensors>& dim_strides) {
    count *= size;
    if (size == 1) return;
    bool merges = rank > 0;
    for (int tensor = 0; tensor < kTensors && merges; ++tensor) {
      merges = strides[tensor][rank - 1] == dim_strides[tensor] * size;
    }
    if (!merges) ++rank;
    sizes[rank - 1] = merges ? sizes[rank - 1] * size : size;
    for (int tensor = 0; tensor < kTensors; ++tensor) strides[tensor][rank - 1] = dim_strides[tensor];
  }

 private:
  // A 64-bit division takes some 70 instructions on a GPU, a 32-bit one a third.
  static constexpr int64_t divide(int64_t a, int64_t b) {
    if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return a / b;
  }
};

// True if `view`'s leading sizes broadcast to `shape`'s as torch does it: aligned at the end, equal or 1.
inline bool rows_broadcast(const TensorView& view, const TensorView& shape) {
  if (view.rank > shape.rank) return false;
  for (int dim = 2; dim <= view.rank; ++dim) {
    if (view.size(-dim) != shape.size(-dim) && view.size(-dim) != 1) return false;
  }
  return true;
}

// The rows of `shape`, in each of `views`, which must broadcast to it.
template <int kTensors>
Rows<kTensors> make_rows(const TensorView& shape, const std::array<const TensorView*, kTensors>& views) {
  Rows<kTensors> rows;
  for (int dim = shape.rank; dim >= 2; --dim) {
    std::array<int64_t, kTensors> strides = {};
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const TensorView& view = *views[tensor];
      strides[tensor] = dim <= view.rank && view.size(-dim) > 1 ? view.stride(-dim) : 0;
    }
    rows.append(shape.size(-dim), strides);
  }
  return rows;
}

// Rows of at most two dimensions and fewer than 2^32: what kernels walk that have no time for divisions.
template <int kTensors>
struct ShortRows {
  uint32_t outer = 1;
  uint32_t inner = 1;
  std::array<int64_t, kTensors> outer_strides = {};
  std::array<int64_t, kTensors> inner_strides = {};

  constexpr int64_t offset(int tensor, uint32_t outer_idx, uint32_t inner_idx) const {
    return outer_idx * outer_strides[tensor] + inner_idx * inner_strides[tensor];
  }

  struct Index {
    uint32_t outer;
    uint32_t inner;
  };
  constexpr Index index(uint32_t row) const {
    const uint32_t outer_idx = row / inner;
    return {.outer = outer_idx, .inner = row - outer_idx * inner};
  }
  // Of the row `next` rows after `index`, if next is at most inner: no further division.
  constexpr int64_t offset(int tensor, const Index& index, uint32_t next) const {
    const int64_t straight = offset(tensor, index.outer, index.inner + next);
    return index.inner + next < inner ? straight : straight + outer_strides[tensor] - inner * inner_strides[tensor];
  }
};

// Nothing if they are more, or of more dimensions.
template <int kTensors>
std::optional<ShortRows<kTensors>> short_rows(const Rows<kTensors>& rows) {
  if (rows.rank > 2 || rows.count >> 32 != 0) return std::nullopt;
  ShortRows<kTensors> short_rows;
  if (rows.rank == 2) short_rows.outer = static_cast<uint32_t>(rows.sizes[0]);
  if (rows.rank > 0) short_rows.inner = static_cast<uint32_t>(rows.sizes[rows.rank - 1]);
  for (int tensor = 0; tensor < kTensors && rows.rank > 0; ++tensor) {
    if (rows.rank == 2) short_rows.outer_strides[tensor] = rows.strides[tensor][0];
    short_rows.inner_strides[tensor] = rows.strides[tensor][rows.rank - 1];
  }
  return short_rows;
}

}  // namespace ltx
