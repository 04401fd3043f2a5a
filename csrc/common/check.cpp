#include <array>
#include <cmath>
#include <cstdio>

#include "common/check.h"

namespace ltx {

int64_t TensorView::num_elements() const { return rank == 0 ? 1 : num_rows() * size(-1); }

int64_t TensorView::num_rows() const {
  int64_t rows = 1;
  for (int dim = 0; dim < rank - 1; ++dim) rows *= sizes[dim];
  return rows;
}

std::string to_string(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kFp8:
      return "float8_e4m3fn";
    case DType::kUint8:
      return "uint8";
    case DType::kFloat64:
      return "float64";
    case DType::kFp8E5m2:
      return "float8_e5m2";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kBool:
      return "bool";
    case DType::kOther:
      break;
  }
  return "another dtype";
}

std::string to_string(const Device& device) {
  if (device.kind == Device::Kind::kCpu) return "cpu";
  if (device.kind == Device::Kind::kCuda) return "cuda:" + std::to_string(device.index);
  if (device.kind == Device::Kind::kNone) return "None";
  return "another device";
}

std::string to_string(const int64_t* sizes, int rank) {
  std::string text = "[";
  for (int dim = 0; dim < rank; ++dim) text += (dim > 0 ? ", " : "") + std::to_string(sizes[dim]);
  return text + "]";
}

std::string shape_of(const TensorView& view) {
  if (view.rank > kMaxRank) return std::to_string(view.rank) + " dimensions";
  return to_string(view.sizes.data(), view.rank);
}

std::string number_to_string(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

namespace {

std::string must(const char* op, const char* name, const std::string& rule, const std::string& got) {
  return std::string(op) + ": " + name + " must " + rule + ", got " + got;
}

}  // namespace

void check_device(const char* op, const char* name, const TensorView& view, const Device& device, const char* like) {
  LTX_CHECK(device.kind == Device::Kind::kCpu || device.kind == Device::Kind::kCuda,
            must(op, like, "be on a CPU or a CUDA device", to_string(device)));
  LTX_CHECK(view.device == device,
            must(op, name, "be on " + to_string(device) + " like " + like, to_string(view.device)));
}

void check_dtype(const char* op, const char* name, const TensorView& view, std::initializer_list<DType> allowed) {
  for (const DType dtype : allowed) {
    if (view.dtype == dtype) return;
  }
  std::string list;
  size_t left = allowed.size();
  for (const DType dtype : allowed) {
    --left;
    list += to_string(dtype) + (left > 1 ? ", " : left == 1 ? " or " : "");
  }
  throw std::runtime_error(must(op, name, "be " + list, to_string(view.dtype)));
}

void check_float_dtype(const char* op, const char* name, const TensorView& view) {
  check_dtype(op, name, view, {DType::kBFloat16, DType::kFloat16, DType::kFloat32});
}

void check_rank(const char* op, const char* name, const TensorView& view, int rank) {
  LTX_CHECK(
      view.rank == rank,
      must(op, name, "have " + std::to_string(rank) + (rank == 1 ? " dimension" : " dimensions"), shape_of(view)));
}

void check_rank_between(const char* op, const char* name, const TensorView& view, int low, int high) {
  LTX_CHECK(
      view.rank >= low && view.rank <= high,
      must(op, name, "have " + std::to_string(low) + " to " + std::to_string(high) + " dimensions", shape_of(view)));
}

void check_shape(const char* op, const char* name, const TensorView& view, std::initializer_list<int64_t> sizes) {
  bool equal = view.rank == static_cast<int>(sizes.size());
  int dim = 0;
  for (const int64_t size : sizes) equal = equal && view.sizes[dim++] == size;
  LTX_CHECK(equal,
            must(op, name, "have shape " + to_string(sizes.begin(), static_cast<int>(sizes.size())), shape_of(view)));
}

void check_last_contiguous(const char* op, const char* name, const TensorView& view) {
  LTX_CHECK(view.size(-1) <= 1 || view.stride(-1) == 1 || view.num_elements() == 0,
            must(op, name, "have a contiguous last dimension", "stride " + std::to_string(view.stride(-1))));
}

void check_positive(const char* op, const char* name, double value) {
  const float rounded = static_cast<float>(value);
  LTX_CHECK(std::isfinite(rounded) && rounded > 0.0f, must(op, name, "be finite and > 0", number_to_string(value)));
}

}  // namespace ltx
