# The kernels, once per instruction set: what the Python module and the tests' driver
# (tests/native) are both made of. Sets HANDLERS, COMMON_FLAGS and OBJECTS.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# An op with native kernels is a folder: <op>/cpu.cc holds the kernels, compiled once per instruction
# set, and <op>/handlers.cc what XLA calls.
set(PALLAS_KERNELS ${CMAKE_CURRENT_LIST_DIR}/..)
file(GLOB KERNELS CONFIGURE_DEPENDS ${PALLAS_KERNELS}/*/cpu.cc)
file(GLOB HANDLERS CONFIGURE_DEPENDS ${PALLAS_KERNELS}/*/handlers.cc)

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
