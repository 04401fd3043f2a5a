#pragma once

#include <stdexcept>
#include <string>

namespace ltx {

// For tests of checks: what `function` throws says, or "no error".
template <class Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace ltx
