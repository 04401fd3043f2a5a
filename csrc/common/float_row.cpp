#include <cstring>

#include "common/check.h"
#include "common/float_row.h"
#include "common/fp8.h"
#include "common/half.h"

namespace ltx {

void load_row(const TensorView& view, int64_t offset, int64_t count, float* row) {
  switch (view.dtype) {
    case DType::kBFloat16: {
      const auto* from = static_cast<const uint16_t*>(view.data) + offset;
      for (int64_t i = 0; i < count; ++i) row[i] = decode_bfloat16(from[i]);
      return;
    }
    case DType::kFloat16: {
      const auto* from = static_cast<const uint16_t*>(view.data) + offset;
      for (int64_t i = 0; i < count; ++i) row[i] = decode_float16(from[i]);
      return;
    }
    case DType::kFloat32:
      if (count > 0) std::memcpy(row, static_cast<const float*>(view.data) + offset, count * sizeof(float));
      return;
    case DType::kFp8: {
      const auto* from = static_cast<const uint8_t*>(view.data) + offset;
      for (int64_t i = 0; i < count; ++i) row[i] = decode_e4m3(from[i]);
      return;
    }
    default:
      LTX_UNREACHABLE("load_row: " + to_string(view.dtype));
  }
}

void store_row(const TensorView& view, int64_t offset, int64_t count, const float* row) {
  switch (view.dtype) {
    case DType::kBFloat16: {
      auto* to = static_cast<uint16_t*>(view.data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = encode_bfloat16(row[i]);
      return;
    }
    case DType::kFloat16: {
      auto* to = static_cast<uint16_t*>(view.data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = encode_float16(row[i]);
      return;
    }
    case DType::kFloat32:
      if (count > 0) std::memcpy(static_cast<float*>(view.data) + offset, row, count * sizeof(float));
      return;
    case DType::kFp8: {
      auto* to = static_cast<uint8_t*>(view.data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = encode_e4m3(row[i]);
      return;
    }
    default:
      LTX_UNREACHABLE("store_row: " + to_string(view.dtype));
  }
}

}  // namespace ltx
