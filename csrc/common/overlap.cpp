#include <algorithm>
#include <array>
#include <cstdint>

#include "common/overlap.h"

namespace ltx {

namespace {

// Adds stride * i for any i of [low, high].
struct Term {
  int64_t stride = 0;
  int64_t low = 0;
  int64_t high = 0;
};

class Distances {
 public:
  // All distances from the start of a row of b to the start of a row of a, in bytes.
  Distances(const TensorView& a, const TensorView& b) {
    for (int dim = 0; dim < a.rank - 1; ++dim) add(a.strides[dim] * size_of(a.dtype), 0, a.sizes[dim] - 1);
    for (int dim = 0; dim < b.rank - 1; ++dim) add(b.strides[dim] * size_of(b.dtype), 1 - b.sizes[dim], 0);
    std::sort(terms_.begin(), terms_.begin() + count_,
              [](const Term& x, const Term& y) { return x.stride > y.stride; });
    for (int i = count_ - 1; i >= 0; --i) {
      lowest_[i] = lowest_[i + 1] + terms_[i].stride * terms_[i].low;
      highest_[i] = highest_[i + 1] + terms_[i].stride * terms_[i].high;
    }
  }

  // True if base + one of the distances lies in [low, high]. Goes from the largest stride to the smallest: what the
  // smaller ones can still add bounds each choice, to one or two where strides nest.
  bool reach(int64_t base, int64_t low, int64_t high, int first = 0) {
    if (base + lowest_[first] > high || base + highest_[first] < low) return false;
    if (first == count_) return true;
    const Term& term = terms_[first];
    const int64_t from = std::max(term.low, ceil_divide(low - highest_[first + 1] - base, term.stride));
    const int64_t to = std::min(term.high, -ceil_divide(base + lowest_[first + 1] - high, term.stride));
    for (int64_t i = from; i <= to; ++i) {
      if (--steps_left_ < 0 || reach(base + i * term.stride, low, high, first + 1)) return true;
    }
    return false;
  }

 private:
  static int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

  void add(int64_t stride, int64_t low, int64_t high) {
    if (stride == 0 || low == high) return;
    Term* end = terms_.begin() + count_;
    Term* same = std::find_if(terms_.begin(), end, [&](const Term& term) { return term.stride == stride; });
    if (same == end) {
      *same = {.stride = stride, .low = low, .high = high};
      ++count_;
    } else {
      same->low += low;
      same->high += high;
    }
  }

  static constexpr size_t kMaxTerms = size_t{2} * kMaxRank;

  int count_ = 0;
  int steps_left_ = 4096;
  std::array<Term, kMaxTerms> terms_;
  std::array<int64_t, kMaxTerms + 1> lowest_ = {};  // of the sum of terms i and on
  std::array<int64_t, kMaxTerms + 1> highest_ = {};
};

}  // namespace

bool overlaps_itself(const TensorView& view) {
  if (view.num_elements() == 0) return false;
  std::array<std::array<int64_t, 2>, kMaxRank> dims;  // stride, size
  for (int dim = 0; dim < view.rank; ++dim) dims[dim] = {view.strides[dim], view.sizes[dim]};
  std::sort(dims.begin(), dims.begin() + view.rank);
  int64_t reached = 0;
  for (int dim = 0; dim < view.rank; ++dim) {
    const auto [stride, size] = dims[dim];
    if (size == 1) continue;
    if (stride <= reached) return true;
    reached += stride * (size - 1);
  }
  return false;
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (a.num_elements() == 0 || b.num_elements() == 0) return false;
  const int64_t base = reinterpret_cast<intptr_t>(a.data) - reinterpret_cast<intptr_t>(b.data);
  const int64_t a_bytes = a.size(-1) * size_of(a.dtype);
  const int64_t b_bytes = b.size(-1) * size_of(b.dtype);
  return Distances(a, b).reach(base, 1 - a_bytes, b_bytes - 1);
}

}  // namespace ltx
