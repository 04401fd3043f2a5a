#include "ops/fp6/fp6.h"

#include <string>

#include "common/check.h"
#include "common/fp6.h"
#include "common/parallel_for.h"

namespace ltx {

void fp6_pack_check(const Fp6PackParams& params) {
  constexpr const char* kOp = "fp6_pack";
  check_device(kOp, "x", params.x, params.x.device, "x");
  check_dtype(kOp, "x", params.x, {DType::kUint8, DType::kFp8});
  check_rank(kOp, "x", params.x, 2);
  LTX_CHECK(params.x.size(1) % 4 == 0,
            std::string(kOp) + ": x must have a last size that is a multiple of 4, got " + shape_of(params.x));
  check_last_contiguous(kOp, "x", params.x);
}

void fp6_unpack_check(const Fp6UnpackParams& params) {
  constexpr const char* kOp = "fp6_unpack";
  check_device(kOp, "x", params.x, params.x.device, "x");
  check_dtype(kOp, "x", params.x, {DType::kUint8});
  check_rank(kOp, "x", params.x, 2);
  LTX_CHECK(params.x.size(1) % 3 == 0,
            std::string(kOp) + ": x must have a last size that is a multiple of 3, got " + shape_of(params.x));
  const int64_t n = params.x.size(1) / 3 * 4;
  LTX_CHECK(params.original_n == n, std::string(kOp) + ": original_n must be " + std::to_string(n) +
                                        ", 4/3 of x's last size, got " + std::to_string(params.original_n));
  check_last_contiguous(kOp, "x", params.x);
}

void fp6_pack_cpu(const Fp6PackParams& params) {
  fp6_pack_check(params);
  const int64_t m = params.x.size(0);
  const int64_t groups = params.x.size(1) / 4;
  parallel_for(m, m * groups, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* e4m3 = static_cast<const uint8_t*>(params.x.data) + row * params.x.stride(0);
      uint8_t* packed = static_cast<uint8_t*>(params.out.data) + row * groups * 3;
      for (int64_t group = 0; group < groups; ++group) pack_fp6(e4m3 + group * 4, packed + group * 3);
    }
  });
}

void fp6_unpack_cpu(const Fp6UnpackParams& params) {
  fp6_unpack_check(params);
  const int64_t m = params.x.size(0);
  const int64_t groups = params.original_n / 4;
  parallel_for(m, m * groups, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* packed = static_cast<const uint8_t*>(params.x.data) + row * params.x.stride(0);
      uint8_t* e4m3 = static_cast<uint8_t*>(params.out.data) + row * groups * 4;
      for (int64_t group = 0; group < groups; ++group) unpack_fp6(packed + group * 3, e4m3 + group * 4);
    }
  });
}

}  // namespace ltx
