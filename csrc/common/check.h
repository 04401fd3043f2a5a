#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/tensor.h"

// Throws std::runtime_error "<op>: <argument> must <rule>, got <value>". The message is only put together when the
// check fails.
#define LTX_CHECK(condition, message)                    \
  do {                                                   \
    if (!(condition)) throw std::runtime_error(message); \
  } while (false)

#define LTX_UNREACHABLE(message) throw std::logic_error(message)

// The rules that many ops share, each with one wording. An op checks in the order device, dtype, rank, shape, strides.
namespace ltx {

// "must be on cuda:0 like x, got cpu". Every op calls it on its first argument too, which must be on a CPU or GPU.
void check_device(const char* op, const char* name, const TensorView& view, const Device& device, const char* like);
// "must be bfloat16, float16 or float32, got int64"
void check_dtype(const char* op, const char* name, const TensorView& view, std::initializer_list<DType> allowed);
void check_float_dtype(const char* op, const char* name, const TensorView& view);
// "must have 3 dimensions, got [2, 64]" / "must have 1 to 8 dimensions, got []"
void check_rank(const char* op, const char* name, const TensorView& view, int rank);
void check_rank_between(const char* op, const char* name, const TensorView& view, int low, int high = kMaxRank);
// "must have shape [2, 64], got [3, 64]"
void check_shape(const char* op, const char* name, const TensorView& view, std::initializer_list<int64_t> sizes);
// "must have a contiguous last dimension, got stride 2"
void check_last_contiguous(const char* op, const char* name, const TensorView& view);
// "must be finite and > 0, got nan"; value is read as fp32, which is what kernels compute with.
void check_positive(const char* op, const char* name, double value);

std::string number_to_string(double value);

}  // namespace ltx
