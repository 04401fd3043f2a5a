#pragma once

#include <cstdint>

#include "common/stream.h"
#include "common/tensor.h"

// fp6_pack: the e4m3 bytes of a matrix as 6-bit codes, four of them in three bytes.
//
//   code = sign << 5 | min(magnitude, 0x1F)          of an e4m3 byte; 0x1F is 0.1171875
//   codes c0..c3 -> bytes c0 << 2 | c1 >> 4, (c1 & 15) << 4 | c2 >> 2, (c2 & 3) << 6 | c3
//
// fp6_unpack: the inverse, code -> byte (code & 0x20) << 2 | (code & 0x1F).
//
// Magnitudes above 0x1F saturate, NaN (0x7F, 0xFF) too. All 64 codes round-trip, -0.0 included. n % 4 == 0. Inputs may
// have any row stride but need a contiguous last dimension; outputs are contiguous and alias nothing. m and n may be 0.
// Exact, so all backends agree bit for bit; deterministic. Format: E2M3 of the OCP Microscaling Formats specification
// 1.0, with the exponent bias of e4m3.
namespace ltx {

struct Fp6PackParams {
  TensorView x;    // [m, n] uint8 or fp8
  TensorView out;  // [m, n * 3 / 4] uint8, contiguous
};

struct Fp6UnpackParams {
  TensorView x;            // [m, n * 3 / 4] uint8
  int64_t original_n = 0;  // n, which must be 4/3 of x's last size
  TensorView out;          // [m, n] uint8, contiguous
};

void fp6_pack_check(const Fp6PackParams& params);
void fp6_unpack_check(const Fp6UnpackParams& params);
void fp6_pack_cpu(const Fp6PackParams& params);
void fp6_unpack_cpu(const Fp6UnpackParams& params);
void fp6_pack_cuda(const Fp6PackParams& params, Stream stream);
void fp6_unpack_cuda(const Fp6UnpackParams& params, Stream stream);

}  // namespace ltx
