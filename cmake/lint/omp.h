// Read by clang-tidy in place of the compiler's omp.h, which no other compiler can read.
#pragma once

extern "C" {
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
}
