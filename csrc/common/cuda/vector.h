#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/fp8.h"
#include "common/tensor.h"

// Vectors of kCount values: held in registers as they lie in memory, unpacked to fp32 where they are used. Each is
// read in accesses of up to 16 bytes, so its address must be a multiple of min(16, its size).
namespace ltx {

template <class T, int kCount>
struct Packed {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static_assert(kBytes % 4 == 0);
  uint32_t words[kBytes / 4];
};

// Plain loads also for what is read once: on an H200 the norm + rotary kernels reach 4.36 TB/s with them at 32768 x
// 4096, and 4.04 with L1::no_allocate, L1::evict_first or .cs loads.
// kReadOnly: nothing writes to the memory while the kernel runs, not the thread itself either.
template <class T, int kCount, bool kReadOnly = true>
__device__ Packed<T, kCount> load(const T* from) {
  Packed<T, kCount> packed;
  constexpr int kBytes = Packed<T, kCount>::kBytes;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4* address = reinterpret_cast<const uint4*>(from) + i;
      const uint4 vector = kReadOnly ? __ldg(address) : *address;
      packed.words[4 * i] = vector.x;
      packed.words[4 * i + 1] = vector.y;
      packed.words[4 * i + 2] = vector.z;
      packed.words[4 * i + 3] = vector.w;
    }
  } else {
    static_assert(kBytes == 8);
    const uint2* address = reinterpret_cast<const uint2*>(from);
    const uint2 vector = kReadOnly ? __ldg(address) : *address;
    packed.words[0] = vector.x;
    packed.words[1] = vector.y;
  }
  return packed;
}

// For outputs that this launch does not read again.
template <class T, int kCount>
__device__ void store(T* to, const Packed<T, kCount>& packed) {
  constexpr int kBytes = Packed<T, kCount>::kBytes;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      __stcs(reinterpret_cast<uint4*>(to) + i, make_uint4(packed.words[4 * i], packed.words[4 * i + 1],
                                                          packed.words[4 * i + 2], packed.words[4 * i + 3]));
    }
  } else {
    static_assert(kBytes == 8);
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(packed.words[0], packed.words[1]));
  }
}

template <int kCount>
__device__ void unpack(const Packed<__nv_bfloat16, kCount>& packed, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    values[2 * i] = __uint_as_float(packed.words[i] << 16);
    values[2 * i + 1] = __uint_as_float(packed.words[i] & 0xFFFF0000);
  }
}

template <int kCount>
__device__ void unpack(const Packed<__half, kCount>& packed, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    values[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(packed.words[i])));
    values[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(packed.words[i] >> 16)));
  }
}

template <int kCount>
__device__ void unpack(const Packed<float, kCount>& packed, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = __uint_as_float(packed.words[i]);
}

template <int kCount>
__device__ void unpack(const Packed<__nv_fp8_e4m3, kCount>& packed, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(packed.words[i / 2] >> i % 2 * 16);
    const float2 floats = __half22float2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
    values[2 * i] = floats.x;
    values[2 * i + 1] = floats.y;
  }
}

template <int kCount>
__device__ void pack(const float (&values)[kCount], Packed<__nv_bfloat16, kCount>& packed) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.words[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
  }
}

template <int kCount>
__device__ void pack(const float (&values)[kCount], Packed<__half, kCount>& packed) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed.words[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
  }
}

template <int kCount>
__device__ void pack(const float (&values)[kCount], Packed<float, kCount>& packed) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) packed.words[i] = __float_as_uint(values[i]);
}

// Infinity would saturate to 448; here it is NaN, as in encode_e4m3.
__device__ inline float2 finite_or_nan(float a, float b) {
  const float nan = __uint_as_float(kQuietNanBits);
  const float infinity = __uint_as_float(kInfinityBits);
  return {fabsf(a) < infinity ? a : nan, fabsf(b) < infinity ? b : nan};
}

template <int kCount>
__device__ void pack(const float (&values)[kCount], Packed<__nv_fp8_e4m3, kCount>& packed) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2(finite_or_nan(values[4 * i], values[4 * i + 1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high =
        __nv_cvt_float2_to_fp8x2(finite_or_nan(values[4 * i + 2], values[4 * i + 3]), __NV_SATFINITE, __NV_E4M3);
    packed.words[i] = low | high << 16;
  }
}

// A value of a float dtype known at run time: as it lies in memory, so that no branch on the dtype waits for the load.
__device__ inline uint32_t load_bits(const void* from, DType dtype, int64_t offset) {
  if (dtype == DType::kFloat32) return static_cast<const uint32_t*>(from)[offset];
  return static_cast<const uint16_t*>(from)[offset];
}

__device__ inline float decode_bits(uint32_t bits, DType dtype) {
  if (dtype == DType::kBFloat16) return __uint_as_float(bits << 16);
  if (dtype == DType::kFloat16) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return __uint_as_float(bits);
}

__device__ inline float load_scalar(const void* from, DType dtype, int64_t offset) {
  if (dtype == DType::kFp8) {
    return __half2float(__nv_cvt_fp8_to_halfraw(static_cast<const uint8_t*>(from)[offset], __NV_E4M3));
  }
  return decode_bits(load_bits(from, dtype, offset), dtype);
}

__device__ inline void store_scalar(void* to, DType dtype, int64_t offset, float value) {
  if (dtype == DType::kFp8) {
    static_cast<__nv_fp8_storage_t*>(to)[offset] =
        __nv_cvt_float_to_fp8(finite_or_nan(value, value).x, __NV_SATFINITE, __NV_E4M3);
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(to)[offset] = __float2half_rn(value);
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(to)[offset] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(to)[offset] = value;
  }
}

// Whether `view` can be read in accesses of `bytes` at every multiple of that many bytes in a row.
inline bool is_aligned(const TensorView& view, int64_t bytes) {
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  for (int dim = 0; dim < view.rank - 1; ++dim) {
    aligned = aligned && (view.size(dim) <= 1 || view.stride(dim) * size_of(view.dtype) % bytes == 0);
  }
  return aligned;
}

}  // namespace ltx
