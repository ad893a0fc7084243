// Blocks of 4096 numbers; in a block element i joins chain i % 64, and the 64 chains are added in
// a fixed tree, so that neither the vector's width nor other rows change a sum.
#include "cpu.h"

#include "../native/simd.h"

namespace jaxserve {
namespace JS_ISA {
namespace {

constexpr int kChains = 64;
constexpr int64_t kBlock = 4096;

float block_sum(const float* x, int64_t size) {
  alignas(64) float chains[kChains];
  vf c[kChains / kLanes] = {};
  int64_t whole = size / kChains * kChains;
  for (int64_t i = 0; i < whole; i += kChains)
    for (int v = 0; v < kChains / kLanes; v++) c[v] += load<vf>(x + i + v * kLanes);
  for (int v = 0; v < kChains / kLanes; v++) store(chains + v * kLanes, c[v]);
  for (int64_t i = whole; i < size; i++) chains[i - whole] += x[i];
  for (int half = kChains / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) chains[i] += chains[i + half];
  return chains[0];
}

float row(const float* x, int64_t size) {
  float sum = 0;
  for (int64_t i = 0; i < size; i += kBlock)
    sum += block_sum(x + i, size - i < kBlock ? size - i : kBlock);
  return sum;
}

}  // namespace

extern const RowSumKernels row_sum_kernels = {row};

}  // namespace JS_ISA
}  // namespace jaxserve
