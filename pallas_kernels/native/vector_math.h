// Functions of a vector, in the same instructions for every lane: no table, no call, no branch.
#pragma once

#include "simd.h"

namespace jaxserve {
namespace JS_ISA {

JS_INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

// e^x for x <= 88, within 1 ulp; exactly 1 for 0, exactly 0 below -87; NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 P(r), P by a minimax fit.
JS_INLINE vf exp_vector(vf x) {
  const float kShift = 12582912.0f;  // 1.5 * 2^23: its sum with n holds n in the low bits
  vf t = fma(x, splat(1.44269504f), splat(kShift));
  vf n = t - kShift;
  vf r = fma(n, splat(-0.693359375f), x);  // 9 bits: exact products
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(0.00139504916f);
  p = fma(p, r, splat(0.0083688898f));
  p = fma(p, r, splat(0.041666206f));
  p = fma(p, r, splat(0.166665182f));
  p = fma(p, r, splat(0.5f));
  vf e = fma(r * r, p, r) + 1.0f;
  vf scaled = e * (vf)(((vu)t << 23) + (127u << 23));
  return select(x < splat(-87.0f), vf{}, scaled);
}

// tanh within 2 ulp: x + x^3 P(x^2) near 0, else 1 - 2 / (e^(2 |x|) + 1).
JS_INLINE vf tanh_vector(vf x) {
  vi sign = (vi)x & (vi)splat(-0.0f);
  vf a = (vf)((vi)x ^ sign);
  vf z = x * x;
  vf p = splat(-0.00590587268f);
  p = fma(p, z, splat(0.0208053887f));
  p = fma(p, z, splat(-0.0537866838f));
  p = fma(p, z, splat(0.133319587f));
  p = fma(p, z, splat(-0.333332986f));
  vf near = fma(x * z, p, x);
  vf bounded = select(a > splat(10.0f), splat(10.0f), a);
  vf far = 1.0f - 2.0f / (exp_vector(bounded + bounded) + 1.0f);
  return select(a < splat(0.6f), near, (vf)((vi)far | sign));
}

}  // namespace JS_ISA
}  // namespace jaxserve
