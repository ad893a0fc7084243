// One row at a time. The squares are summed in 16 chains (element i in chain i % 16) that are
// joined in a fixed tree, on every instruction set.
#include "cpu.h"

#include "../native/simd.h"

namespace jaxserve {
namespace JS_ISA {
namespace {

constexpr int kChains = 16;

float sum_of_squares(const float* x, int64_t size) {
  alignas(64) float chains[kChains];
  vf c[kChains / kLanes] = {};
  int64_t whole = size / kChains * kChains;
  for (int64_t i = 0; i < whole; i += kChains)
    for (int v = 0; v < kChains / kLanes; v++) {
      vf a = load<vf>(x + i + v * kLanes);
      c[v] = fma(a, a, c[v]);
    }
  for (int v = 0; v < kChains / kLanes; v++) store(chains + v * kLanes, c[v]);
  for (int64_t i = whole; i < size; i++) chains[i - whole] += x[i] * x[i];
  for (int half = kChains / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) chains[i] += chains[i + half];
  return chains[0];
}

void row(const float* x, const float* weight, float eps, float* out, int64_t size) {
  float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / (float)size + eps);
  for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

}  // namespace

extern const RmsNormKernels rms_norm_kernels = {row};

}  // namespace JS_ISA
}  // namespace jaxserve
