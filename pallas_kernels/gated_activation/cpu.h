#pragma once

#include <cstdint>

#include "../native/isa.h"

namespace jaxserve {

constexpr int kSilu = 0, kGeluTanh = 1;  // numbers of cpu.py

struct GatedActivationKernels {
  // out[i] = f(gate[i]) * up[i] for i < size; f by its number.
  void (*row)(int function, const float* gate, const float* up, float* out, int64_t size);
};

}  // namespace jaxserve

JS_KERNEL_TABLE(GatedActivationKernels, gated_activation_kernels)
