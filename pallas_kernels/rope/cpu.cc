// Of a b - c d a compiler may fuse either product into one rounding, and may choose differently for
// whole vectors and for the rest of a row. Here the second product is always rounded, then the
// first one fused, for every element.
#include "cpu.h"

#include "../native/simd.h"

namespace jaxserve {
namespace JS_ISA {
namespace {

// first c - second s and second c + first s of kLanes pairs.
JS_INLINE void turn(vf first, vf second, vf c, vf s, vf* low, vf* high) {
  vf minus = second * s, plus = first * s;
  // Opaque to the compiler, so that no multiplication is left for it to fuse with.
  asm("" : JS_VECTOR_OPERAND(minus));
  asm("" : JS_VECTOR_OPERAND(plus));
  *low = fma(first, c, -minus);
  *high = fma(second, c, plus);
}

void head(const float* x, const float* c, const float* s, float* out, int64_t half) {
  int64_t i = 0;
  vf low, high;
  for (; i + kLanes <= half; i += kLanes) {
    turn(load<vf>(x + i), load<vf>(x + half + i), load<vf>(c + i), load<vf>(s + i), &low, &high);
    store(out + i, low);
    store(out + half + i, high);
  }
  if (i == half) return;
  float part[4][kLanes] = {}, both[2][kLanes];
  const float* from[4] = {x + i, x + half + i, c + i, s + i};
  for (int j = 0; j < 4; j++) std::memcpy(part[j], from[j], (half - i) * sizeof(float));
  turn(load<vf>(part[0]), load<vf>(part[1]), load<vf>(part[2]), load<vf>(part[3]), &low, &high);
  store(both[0], low);
  store(both[1], high);
  std::memcpy(out + i, both[0], (half - i) * sizeof(float));
  std::memcpy(out + half + i, both[1], (half - i) * sizeof(float));
}

}  // namespace

extern const RopeKernels rope_kernels = {head};

}  // namespace JS_ISA
}  // namespace jaxserve
