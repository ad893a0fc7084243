#pragma once

#include <cstdint>

#include "../native/isa.h"

namespace jaxserve {

struct RopeKernels {
  // One head: the pairs (i, i + half) of x turned by the angles with cosines c and sines s [half].
  void (*head)(const float* x, const float* c, const float* s, float* out, int64_t half);
};

}  // namespace jaxserve

JS_KERNEL_TABLE(RopeKernels, rope_kernels)
