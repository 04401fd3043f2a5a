#pragma once

#include <cfenv>

namespace ltx {

// While it lives, this thread rounds to nearest and keeps subnormals. torch.set_flush_denormal sets that for the
// calling thread and for those that it starts later, so results would depend on which thread computes a row.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t before_{};
};

}  // namespace ltx
