#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "common/default_arithmetic.h"

namespace ltx {

// body(begin, end) over parts of [0, count), on torch's threads (its OpenMP runtime is the one in the process).
// `work` is the number of elements in all: little work stays on the calling thread. body must not throw. It computes
// with DefaultArithmetic on every thread.
template <class Body>
void parallel_for(int64_t count, int64_t work, const Body& body) {
  constexpr int64_t kElementsPerThread = 32768;  // below this, waking a thread costs more than it saves
  const int64_t threads = std::min<int64_t>({omp_get_max_threads(), count, work / kElementsPerThread});
  if (threads <= 1) {
    const DefaultArithmetic arithmetic;
    if (count > 0) body(int64_t{0}, count);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const DefaultArithmetic arithmetic;
    const int64_t thread = omp_get_thread_num();
    const int64_t num_threads = omp_get_num_threads();
    const int64_t begin = count * thread / num_threads;
    const int64_t end = count * (thread + 1) / num_threads;
    if (begin < end) body(begin, end);
  }
}

}  // namespace ltx
