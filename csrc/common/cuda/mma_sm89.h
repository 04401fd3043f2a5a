#pragma once

#include <cuda_fp16.h>

#include <cstdint>

// mma.sync: a warp multiplies e4m3 matrices that it holds in registers, from compute capability 8.9 on; and ldmatrix,
// which brings them there. 9.0 and 10.0 have no such instruction and emulate it.
namespace ltx {

// Four matrices of 8 rows of 16 bytes; lane 8 i + r has the address of row r of matrix i. Lane t gets of each the bytes
// t % 4 * 4 + {0, 1, 2, 3} of row t / 4.
__device__ inline void load_matrices(uint32_t (&matrices)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

// d += a b^T: 16 rows of a and 8 of b, 32 bytes of each. a: the matrices of rows 0 to 7 and 8 to 15 in the first 16
// bytes, then the same in the last 16; b: both halves of its rows. Lane t has of row t / 4 + 8 h the columns
// t % 4 * 2 + {0, 1} in d[2 h + {0, 1}].
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same in half precision: the two columns of a row in d[h].
__device__ inline void mma(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Element i of d.
__device__ inline float element(const float (&d)[4], int i) { return d[i]; }
__device__ inline float element(const uint32_t (&d)[2], int i) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(d[i / 2] >> i % 2 * 16)));
}

}  // namespace ltx
