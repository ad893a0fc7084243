#pragma once

#include <cstdint>

#include "../native/isa.h"

namespace jaxserve {

struct RmsNormKernels {
  // out[i] = x[i] / sqrt(mean of squares + eps) * weight[i], for one row of `size`.
  void (*row)(const float* x, const float* weight, float eps, float* out, int64_t size);
};

}  // namespace jaxserve

JS_KERNEL_TABLE(RmsNormKernels, rms_norm_kernels)
