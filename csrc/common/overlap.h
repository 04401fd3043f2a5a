#pragma once

#include "common/tensor.h"

// Whether an op that writes in place may do so. Views of one allocation that interleave without sharing an element,
// such as the chunks of a fused projection, do not overlap.
namespace ltx {

// True if two elements of `view` share memory, or if its strides do not nest: sorted, each must step over all that the
// smaller ones reach. Slices, transposes and chunks of a dense tensor nest.
bool overlaps_itself(const TensorView& view);

// True if an element of `a` shares memory with one of `b`; both have a contiguous last dimension. Exact, but where
// unrelated strides would take a long search it gives up and says true.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace ltx
