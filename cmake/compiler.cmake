# The host compiler must know C++20: an older one would fail later, with pages that name the wrong cause.
set(ltx_minimum_GNU 11)
set(ltx_minimum_Clang 14)
if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS "${ltx_minimum_${CMAKE_CXX_COMPILER_ID}}")
  message(FATAL_ERROR "The C++ compiler must know C++20 (GNU ${ltx_minimum_GNU} or Clang ${ltx_minimum_Clang}), got "
                      "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}: ${CMAKE_CXX_COMPILER}. "
                      "CXX=<compiler> chooses another.")
endif()
