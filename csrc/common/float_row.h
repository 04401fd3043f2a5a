#pragma once

#include <cstdint>

#include "common/tensor.h"

// A CPU backend works on rows of fp32: it loads each row once, whatever its dtype, and rounds once when it stores.
namespace ltx {

// `count` contiguous elements from `offset` on. dtype: bf16, fp16, fp32 or fp8.
void load_row(const TensorView& view, int64_t offset, int64_t count, float* row);
void store_row(const TensorView& view, int64_t offset, int64_t count, const float* row);

}  // namespace ltx
