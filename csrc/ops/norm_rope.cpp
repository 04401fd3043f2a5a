#include <string>

#include "common/check.h"
#include "ops/norm_rope.h"

namespace ltx {

void check_norm_rope_qk(const char* op,
                        void (*check)(const char* op, const NormRopeNames& names, const NormRopeParams& params),
                        const NormRopeQkParams& params) {
  check(op, {.x = "q", .weights = "q_weights"}, params.q);
  check_device(op, "k", params.k.x, params.q.x.device, "q");
  check(op, {.x = "k", .cos_freqs = "k_cos_freqs", .sin_freqs = "k_sin_freqs", .weights = "k_weights"}, params.k);
  LTX_CHECK(params.k.x.size(-1) == params.q.x.size(-1), std::string(op) + ": k must have the last size of q, " +
                                                            std::to_string(params.q.x.size(-1)) + ", got " +
                                                            shape_of(params.k.x));
}

DType rotated_dtype(DType x, bool out_fp8) {
  if (out_fp8) return DType::kFp8;
  return x == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

}  // namespace ltx
