#pragma once

#include <cstdint>

#include "../native/isa.h"

namespace jaxserve {

struct RowSumKernels {
  float (*row)(const float* x, int64_t size);
};

}  // namespace jaxserve

JS_KERNEL_TABLE(RowSumKernels, row_sum_kernels)
