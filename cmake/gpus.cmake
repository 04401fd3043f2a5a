# LTX_GPU_CAPABILITIES  one entry a GPU of this machine that can run CUDA code of this project, e.g. "9.0;9.0"
# LTX_OLD_GPUS          one entry a GPU that is too old for it
# Both are empty without a GPU or driver.
set(ltx_minimum_capability 8.0)

execute_process(
  COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
  OUTPUT_VARIABLE found RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  set(found "")
endif()
string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
set(LTX_GPU_CAPABILITIES "")
set(LTX_OLD_GPUS "")
foreach(capability IN LISTS found)
  if(capability VERSION_LESS ltx_minimum_capability)
    list(APPEND LTX_OLD_GPUS ${capability})
  else()
    list(APPEND LTX_GPU_CAPABILITIES ${capability})
  endif()
endforeach()
