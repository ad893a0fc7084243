// Element by element: a number's bits depend on that number alone, also in the last, partial vector
// of a row, which goes through the same instructions.
#include "cpu.h"

#include "../native/vector_math.h"

namespace jaxserve {
namespace JS_ISA {
namespace {

struct Silu {  // x / (1 + e^-x)
  static JS_INLINE vf of(vf x) {
    vf bounded = select(x < splat(-88.0f), splat(-88.0f), x);
    return x / (exp_vector(-bounded) + 1.0f);
  }
};

struct GeluTanh {  // x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  static JS_INLINE vf of(vf x) {
    vf inner = fma(x * x, x * splat(0.044715f), x) * splat(0.797884561f);
    return x * splat(0.5f) * (tanh_vector(inner) + 1.0f);
  }
};

template <class Function>
void apply(const float* gate, const float* up, float* out, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(out + i, Function::of(load<vf>(gate + i)) * load<vf>(up + i));
  if (i == size) return;
  float g[kLanes] = {}, u[kLanes] = {}, y[kLanes];
  std::memcpy(g, gate + i, (size - i) * sizeof(float));
  std::memcpy(u, up + i, (size - i) * sizeof(float));
  store(y, Function::of(load<vf>(g)) * load<vf>(u));
  std::memcpy(out + i, y, (size - i) * sizeof(float));
}

void row(int function, const float* gate, const float* up, float* out, int64_t size) {
  if (function == kSilu) {
    apply<Silu>(gate, up, out, size);
  } else {
    apply<GeluTanh>(gate, up, out, size);
  }
}

}  // namespace

extern const GatedActivationKernels gated_activation_kernels = {row};

}  // namespace JS_ISA
}  // namespace jaxserve
