# The targets of the framework wall, and how a room joins them.
#   ltx_kernels_core           all _cpu.cpp and .cu files; knows no torch
#   ltx_{cuda,sm89,sm90}       the .cu files of one family, compiled for its architectures; parts of the core
#   <module>                   a Python extension module: the _binding.cpp files of its rooms
find_package(OpenMP REQUIRED COMPONENTS CXX)

set(ltx_common ${PROJECT_SOURCE_DIR}/csrc/common)
add_library(ltx_kernels_core STATIC ${ltx_common}/check.cpp ${ltx_common}/float_row.cpp)
target_include_directories(ltx_kernels_core PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/csrc ${CMAKE_CURRENT_BINARY_DIR}/generated)
target_compile_options(ltx_kernels_core PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off>)
target_link_libraries(ltx_kernels_core PUBLIC OpenMP::OpenMP_CXX)

# The libraries of the families and the C++ test are made at their first source: CMake refuses a target without one.
function(ltx_add_family_sources family)
  if(NOT ARGN OR NOT ltx_archs_${family})
    return()
  endif()
  set(target ltx_${family})
  if(NOT TARGET ${target})
    add_library(${target} OBJECT)
    set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${ltx_archs_${family}}")
    # The option lets device code call constexpr functions of the headers that host code shares.
    target_compile_options(${target} PRIVATE --expt-relaxed-constexpr -Xcompiler=-Wall)
    target_include_directories(${target} PRIVATE $<TARGET_PROPERTY:ltx_kernels_core,INCLUDE_DIRECTORIES>)
    if(NOT family STREQUAL cuda)
      ltx_need_cutlass()
      target_link_libraries(${target} PRIVATE cutlass)
    endif()
    target_sources(ltx_kernels_core PRIVATE $<TARGET_OBJECTS:${target}>)
  endif()
  target_sources(${target} PRIVATE ${ARGN})
endfunction()

function(ltx_add_test_sources)
  if(NOT ARGN OR NOT LTX_TESTS)
    return()
  endif()
  if(NOT TARGET core_test)
    include(GoogleTest)
    add_executable(core_test)
    target_link_libraries(core_test PRIVATE ltx_kernels_core GTest::gtest_main)
    gtest_discover_tests(core_test DISCOVERY_MODE PRE_TEST)  # the default runs the program during the build
  endif()
  target_sources(core_test PRIVATE ${ARGN})
endfunction()

ltx_add_family_sources(cuda ${ltx_common}/cuda/device.cu)

# What was built, for code that asks.
foreach(family cuda sm89 sm90)
  if(ltx_archs_${family})
    set(LTX_HAS_${family} true)
  else()
    set(LTX_HAS_${family} false)
  endif()
endforeach()
list(TRANSFORM ltx_archs_cuda REPLACE "(.*)-real" "sm_\\1" OUTPUT_VARIABLE LTX_BUILT_ARCHITECTURES)
list(TRANSFORM LTX_BUILT_ARCHITECTURES REPLACE "(.*)-virtual" "compute_\\1")
list(JOIN LTX_BUILT_ARCHITECTURES " " LTX_BUILT_ARCHITECTURES)
configure_file(${ltx_common}/built.h.in generated/common/built.h)

# ltx_add_module(<folder>): the extension module ltx_kernels.<folder>_cpp. It uses the limited Python API, so one file
# serves every CPython from 3.10 on.
function(ltx_add_module folder)
  set(module ${folder}_cpp)
  add_library(${module} MODULE ${PROJECT_SOURCE_DIR}/csrc/torch/python_module.cpp ${PROJECT_SOURCE_DIR}/csrc/torch/binding.cpp)
  set_target_properties(${module} PROPERTIES PREFIX "" SUFFIX .abi3.so LINKER_LANGUAGE CXX)
  target_compile_definitions(${module} PRIVATE LTX_MODULE=${module})
  target_compile_options(${module} PRIVATE -Wall -Wextra)
  target_link_libraries(${module} PRIVATE ltx_kernels_core torch_stable ${CMAKE_DL_LIBS})
  target_link_options(${module} PRIVATE LINKER:--exclude-libs,ALL LINKER:--gc-sections)
  install(TARGETS ${module} LIBRARY DESTINATION ltx_kernels)
endfunction()

# ltx_add_op(<folder>/<op> [NO_FMAD] CPU <file>... BINDING <file>... [CUDA|SM89|SM90 <file>...] [TEST <file>...])
# NO_FMAD keeps nvcc from contracting a * b + c, for ops that agree bit for bit with the CPU backend.
function(ltx_add_op room)
  cmake_parse_arguments(PARSE_ARGV 1 op NO_FMAD "" "CPU;CUDA;SM89;SM90;BINDING;TEST")
  foreach(kind CPU CUDA SM89 SM90 BINDING TEST)
    list(TRANSFORM op_${kind} PREPEND ${PROJECT_SOURCE_DIR}/csrc/${room}/)
  endforeach()
  string(REGEX MATCH "^[^/]+" folder ${room})

  target_sources(ltx_kernels_core PRIVATE ${op_CPU})
  target_sources(${folder}_cpp PRIVATE ${op_BINDING})
  ltx_add_test_sources(${op_TEST})
  foreach(family cuda sm89 sm90)
    string(TOUPPER ${family} kind)
    ltx_add_family_sources(${family} ${op_${kind}})
    if(op_NO_FMAD AND TARGET ltx_${family})
      set_source_files_properties(${op_${kind}} TARGET_DIRECTORY ltx_${family} PROPERTIES COMPILE_OPTIONS -fmad=false)
    endif()
  endforeach()
endfunction()
