#pragma once

#include "common/cuda/vector.h"

// Eight neighbouring values of a row, which one thread loads together and holds as they lie in memory until it needs
// them in fp32: no load waits for the one before, whatever the dtypes.
namespace ltx {

inline constexpr int kLaneValues = 8;

// How a kernel reads a tensor: by a dtype that it is compiled for, which needs a row of whole lanes, each aligned to
// min(16, its size) bytes; or one of these.
struct AnyDtype {};   // a dtype known at run time, else the same
struct AnyTensor {};  // any dtype, size and alignment: value by value

struct Operand {
  const void* data;
  DType dtype;
};

inline Operand operand(const TensorView& view) { return {.data = view.data, .dtype = view.dtype}; }

template <class T>
struct Lane {
  Packed<T, kLaneValues> packed;
};

template <>
struct Lane<AnyDtype> {
  uint32_t words[kLaneValues];  // the first half alone if the dtype has two bytes
};

template <>
struct Lane<AnyTensor> {
  float values[kLaneValues];
};

// The lane at `offset`, of which `left` values and perhaps more are in the row; zeros elsewhere. left > 0.
template <class T, bool kReadOnly = true>
__device__ Lane<T> load_lane(const Operand& from, int64_t offset, int left) {
  if constexpr (std::is_same_v<T, AnyTensor>) {
    Lane<T> lane = {};
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      if (i < left) lane.values[i] = load_scalar(from.data, from.dtype, offset + i);
    }
    return lane;
  } else if constexpr (std::is_same_v<T, AnyDtype>) {
    const bool wide = from.dtype == DType::kFloat32;
    const uint4* address =
        reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(from.data) + offset * (wide ? 4 : 2));
    const uint4 low = __ldg(address);
    const uint4 high = wide ? __ldg(address + 1) : uint4{};
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  } else {
    return {load<T, kLaneValues, kReadOnly>(static_cast<const T*>(from.data) + offset)};
  }
}

template <class T>
__device__ void unpack_lane(const Lane<T>& lane, DType dtype, float (&values)[kLaneValues]) {
  if constexpr (std::is_same_v<T, AnyTensor>) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) values[i] = lane.values[i];
  } else if constexpr (std::is_same_v<T, AnyDtype>) {
    const uint32_t* words = lane.words;
    if (dtype == DType::kFloat32) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) values[i] = __uint_as_float(words[i]);
    } else if (dtype == DType::kBFloat16) {
      unpack(Packed<__nv_bfloat16, kLaneValues>{{words[0], words[1], words[2], words[3]}}, values);
    } else {
      unpack(Packed<__half, kLaneValues>{{words[0], words[1], words[2], words[3]}}, values);
    }
  } else {
    unpack(lane.packed, values);
  }
}

// T: how the tensor was read whose rows these are, and so whether they are made of whole, aligned lanes.
template <class T, class To>
__device__ void store_lane(To* to, int left, const Packed<To, kLaneValues>& packed) {
  if constexpr (std::is_same_v<T, AnyTensor>) {
    using Bits = std::conditional_t<sizeof(To) == 1, uint8_t, uint16_t>;
    static_assert(sizeof(Bits) == sizeof(To));
    constexpr int kInWord = 4 / static_cast<int>(sizeof(To));
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const uint32_t bits = packed.words[i / kInWord] >> i % kInWord * (32 / kInWord);
      if (i < left) reinterpret_cast<Bits*>(to)[i] = static_cast<Bits>(bits);
    }
  } else if (left > 0) {
    store(to, packed);
  }
}

// How a kernel counts rows and columns: in 64 bits only where a tensor is read value by value.
template <class T>
using LaneIndex = std::conditional_t<std::is_same_v<T, AnyTensor>, int64_t, uint32_t>;

inline constexpr int64_t kMaxLaneHidden = int64_t{1} << 30;

// Values of a row from `column` on, in 32 bits: at most as many as matter.
__device__ inline int values_left(int64_t hidden, int64_t column) {
  return static_cast<int>(min(hidden - column, kMaxLaneHidden));
}
__device__ inline int values_left(int64_t hidden, uint32_t column) {
  return static_cast<int>(static_cast<uint32_t>(hidden) - column);
}

// Calls call(std::type_identity<T>()) with the type of a float dtype.
template <class Call>
void with_float_type(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kBFloat16:
      return call(std::type_identity<__nv_bfloat16>());
    case DType::kFloat16:
      return call(std::type_identity<__half>());
    case DType::kFloat32:
      return call(std::type_identity<float>());
    default:
      LTX_UNREACHABLE("with_float_type: " + to_string(dtype));
  }
}

// Whether rows of `hidden` values can be read in lanes of one type.
inline bool reads_lanes(const TensorView& view, int64_t hidden) {
  return hidden % kLaneValues == 0 && hidden <= kMaxLaneHidden && is_aligned(view, 16);
}

}  // namespace ltx
