#include <string>

#include "blockwise/modulation.h"
#include "common/check.h"
#include "common/rows.h"

namespace ltx {

void check_modulation(const char* op, const char* name, const TensorView& view, const TensorView& x) {
  check_device(op, name, view, x.device, "x");
  check_float_dtype(op, name, view);
  check_rank_between(op, name, view, 1);
  LTX_CHECK(view.size(-1) == x.size(-1) && rows_broadcast(view, x),
            std::string(op) + ": " + name + " must broadcast to " + shape_of(x) + " with a last size of " +
                std::to_string(x.size(-1)) + ", got " + shape_of(view));
  check_last_contiguous(op, name, view);
}

}  // namespace ltx
