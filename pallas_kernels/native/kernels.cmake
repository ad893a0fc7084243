# The kernels, once per instruction set: what the Python module and the tests' driver
# (tests/native) are both made of. Sets OPS, COMMON_FLAGS and OBJECTS.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# One line per op: <op>/cpu.cc holds the kernels, compiled once per instruction set, and
# <op>/handlers.cc what XLA calls.
set(OPS quantized_matmul rms_norm gated_activation paged_attention)

set(PALLAS_KERNELS ${CMAKE_CURRENT_LIST_DIR}/..)
set(KERNELS)
foreach(op IN LISTS OPS)
  list(APPEND KERNELS ${PALLAS_KERNELS}/${op}/cpu.cc)
endforeach()

set(COMMON_FLAGS -fvisibility=hidden -ffp-contract=fast -fno-math-errno -Wall -Wextra
                 -Wno-psabi -Wno-missing-field-initializers)

# add_isa(NAME LANES [FLAGS...]): a copy of the kernels in the namespace NAME.
set(OBJECTS)
function(add_isa name lanes)
  add_library(kernels_${name} OBJECT ${KERNELS})
  set_target_properties(kernels_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_definitions(kernels_${name} PRIVATE JS_ISA=${name} JS_LANES=${lanes})
  target_compile_options(kernels_${name} PRIVATE ${COMMON_FLAGS} ${ARGN})
  set(OBJECTS ${OBJECTS} $<TARGET_OBJECTS:kernels_${name}> PARENT_SCOPE)
endfunction()

set(AVX2_FLAGS -mavx2 -mfma -mf16c)
add_isa(baseline 4)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  add_isa(avx2 8 ${AVX2_FLAGS})
  add_isa(avx512 16 -mavx512f -mavx512bw -mavx512dq -mavx512vl ${AVX2_FLAGS}
          -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
