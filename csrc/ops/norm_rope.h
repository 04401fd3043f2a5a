#pragma once

#include <optional>

#include "common/tensor.h"

// What the ops that normalize a row and then rotate it share: their arguments, and the order in which they check them.
namespace ltx {

// Sizes, dtypes and strides are in the header of each op.
struct NormRopeParams {
  TensorView x;
  TensorView cos_freqs;
  TensorView sin_freqs;
  std::optional<TensorView> weights;
  double eps = 0;
  TensorView out;  // of x's shape, contiguous
};

struct NormRopeQkParams {
  NormRopeParams q;
  NormRopeParams k;  // of q's last size; its tables are q's where the caller gives none, then k has q's shape
};

// What the caller of an op calls the arguments.
struct NormRopeNames {
  const char* x = "x";
  const char* cos_freqs = "cos_freqs";
  const char* sin_freqs = "sin_freqs";
  const char* weights = "weights";
};

// `check` is an op's check of one tensor.
void check_norm_rope_qk(const char* op,
                        void (*check)(const char* op, const NormRopeNames& names, const NormRopeParams& params),
                        const NormRopeQkParams& params);

// fp8 where it is asked for, else fp16 for fp16 and bf16 for all others.
DType rotated_dtype(DType x, bool out_fp8);

}  // namespace ltx
