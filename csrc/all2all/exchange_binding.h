#pragma once

#include <vector>

#include "all2all/exchange.h"
#include "torch/binding.h"

namespace ltx {

// What the bindings of all rooms do: look the communicator up, check, call the transport, count the call in `state`.
// out_tokens and out_heads, which a compiler needs, must be those of the result.
std::vector<Tensor> exchange(ExchangeOp op, const std::vector<Tensor>& tensors, const Tensor& state,
                             int64_t communicator, int64_t out_tokens, int64_t out_heads, bool copy_out);

}  // namespace ltx
