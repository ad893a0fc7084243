// Vectors of the width this file is compiled for, in GCC/Clang vector extensions: one source for
// SSE2, AVX2, AVX-512 and NEON. Each kernel file is compiled once per instruction set, with
//   JS_ISA    the namespace of that copy (baseline, avx2, avx512, neon)
//   JS_LANES  float32 lanes of one vector (4, 8 or 16)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace jaxserve {
namespace JS_ISA {

constexpr int kLanes = JS_LANES;

typedef float vf __attribute__((vector_size(4 * JS_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * JS_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * JS_LANES)));
typedef uint16_t vu16 __attribute__((vector_size(2 * JS_LANES)));
typedef int8_t vi8 __attribute__((vector_size(JS_LANES)));
typedef uint8_t vu8 __attribute__((vector_size(JS_LANES)));

#define JS_INLINE inline __attribute__((always_inline))
#define JS_INLINE_LAMBDA __attribute__((always_inline))

// For asm statements that hide a vector's value from the compiler.
#if defined(__x86_64__) && (JS_LANES < 16 || defined(__AVX512F__))
#define JS_VECTOR_OPERAND(v) "+x"(v)
#elif defined(__x86_64__)  // the tests' 16 lanes without AVX-512
#define JS_VECTOR_OPERAND(v) "+m"(v)
#else
#define JS_VECTOR_OPERAND(v) "+w"(v)
#endif

// Unaligned, alias-free loads and stores: one instruction each.
template <class V, class T>
JS_INLINE V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class T, class V>
JS_INLINE void store(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// a - 0 is a, bit for bit, and compilers know it (0 + a would turn -0 into 0).
JS_INLINE vf splat(float a) { return a - vf{}; }

JS_INLINE vf as_float(vu bits) { return (vf)bits; }

JS_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

JS_INLINE vf to_float(vu v) { return to_float((vi)v); }  // for values below 2^31

// Contracted to one rounding where the instruction set has a fused multiply-add.
JS_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }

JS_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  float magnitude;
  if (exponent == 0) {
    magnitude = (float)mantissa * 0x1p-24f;
  } else {
    uint32_t bits = (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | mantissa << 13;
    std::memcpy(&magnitude, &bits, 4);
  }
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// kLanes float16 numbers.
JS_INLINE vf load_half(const void* p) {
#if defined(__AVX512F__) && JS_LANES == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && JS_LANES == 8
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vu16 h = load<vu16>((const uint16_t*)p);
  vf v;
  for (int i = 0; i < kLanes; i++) v[i] = half_to_float(h[i]);
  return v;
#endif
}

// kLanes bytes, widened. Spelled out for x86, where compilers take generic conversions apart.
JS_INLINE vi load_i8_as_int(const void* p) {
#if defined(__AVX512F__) && JS_LANES == 16
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__) && JS_LANES == 8
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(load<vi8>((const int8_t*)p), vi);
#endif
}

JS_INLINE vu load_u8_as_int(const void* p) {
#if defined(__AVX512F__) && JS_LANES == 16
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__) && JS_LANES == 8
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(load<vu8>((const uint8_t*)p), vu);
#endif
}

JS_INLINE vu load_u16_as_int(const void* p) {
#if defined(__AVX512F__) && JS_LANES == 16
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && JS_LANES == 8
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  return __builtin_convertvector(load<vu16>((const uint16_t*)p), vu);
#endif
}

JS_INLINE vf load_i8(const void* p) { return to_float(load_i8_as_int(p)); }

JS_INLINE vf load_u8(const void* p) { return to_float(load_u8_as_int(p)); }

// kLanes bfloat16 numbers.
JS_INLINE vf load_bf16(const void* p) { return as_float(load_u16_as_int(p) << 16); }

}  // namespace JS_ISA
}  // namespace jaxserve
