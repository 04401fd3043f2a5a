#pragma once

#include <array>
#include <cstdint>
#include <string>

// What the core sees of a tensor: a pointer, a type and a strided shape. It owns nothing.
namespace ltx {

enum class DType : uint8_t {
  kBFloat16,
  kFloat16,
  kFloat32,
  kFp8,  // e4m3fn
  kUint8,
  kFloat64,
  kFp8E5m2,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kOther,
};

struct Device {
  enum class Kind : uint8_t { kCpu, kCuda, kOther, kNone };  // kNone: Python's None in a tensor's place
  Kind kind = Kind::kCpu;
  int index = 0;  // of a GPU

  bool operator==(const Device& other) const {
    return kind == other.kind && (kind == Kind::kCpu || index == other.index);
  }
};

inline constexpr int kMaxRank = 8;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int rank = 0;                                // may exceed kMaxRank: the checks of a rank refuse such a tensor
  std::array<int64_t, kMaxRank> sizes = {};    // of the first `rank` dimensions
  std::array<int64_t, kMaxRank> strides = {};  // in elements

  // Negative dimensions count from the end.
  int64_t size(int dim) const { return sizes[dim < 0 ? dim + rank : dim]; }
  int64_t stride(int dim) const { return strides[dim < 0 ? dim + rank : dim]; }
  int64_t num_elements() const;
  int64_t num_rows() const;  // the product of all sizes but the last
};

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFp8:
    case DType::kFp8E5m2:
    case DType::kUint8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    default:
      return 8;
  }
}

// Torch's names, for messages: "bfloat16", "cuda:0", "[2, 64]".
std::string to_string(DType dtype);
std::string to_string(const Device& device);
std::string to_string(const int64_t* sizes, int rank);
std::string shape_of(const TensorView& view);

// A contiguous view with these sizes: what tests build and what an allocation returns.
template <size_t kRank>
TensorView contiguous_view(void* data, DType dtype, const std::array<int64_t, kRank>& sizes, Device device = {}) {
  static_assert(kRank <= kMaxRank);
  TensorView view{.data = data, .dtype = dtype, .device = device, .rank = static_cast<int>(kRank)};
  int64_t stride = 1;
  for (int dim = static_cast<int>(kRank) - 1; dim >= 0; --dim) {
    view.sizes[dim] = sizes[dim];
    view.strides[dim] = stride;
    stride *= sizes[dim] > 0 ? sizes[dim] : 1;
  }
  return view;
}

}  // namespace ltx
