#pragma once

#include "common/tensor.h"

namespace ltx {

// A factor or an addend for each row of x: a float dtype, x's last size, contiguous, leading sizes that broadcast to
// x's.
void check_modulation(const char* op, const char* name, const TensorView& view, const TensorView& x);

}  // namespace ltx
