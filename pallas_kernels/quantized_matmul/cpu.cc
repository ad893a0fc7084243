// Products of float32 activations with packed weights, expanded to float32 in registers.
//
// Panels: 32 output rows side by side, so that a vector holds one input column of several outputs
// and no sum ever crosses lanes. For each output the arithmetic is the same whatever M is:
//   y = 0; for each block of 256 inputs: { c = 0; for k in order: c = fma(w[k], x[k], c); y += c }
// so a row's bits do not depend on its neighbours, on the bucket, or on the path taken below:
//   few rows   weights are expanded in registers and multiplied there: every packed byte is read
//              once, nothing else is written.
//   more rows  the same for the first rows and half a panel; what is expanded on the way, 256
//              inputs at a time, is kept in a 16 KiB tile in the L1 cache, from where it is
//              multiplied with the other rows, six at a time held in registers.
#include "cpu.h"

#include "../native/simd.h"

namespace jaxserve {
namespace JS_ISA {
namespace {

constexpr int64_t kPlane4 = 16 * 8;  // bytes of 8 inputs of 4-bit codes: 32 words of 8 nibbles

// Which outputs of a panel are looked at: `count` vectors of them from vector `first` on.
template <int first, int count>
struct Outputs {
  static constexpr int NV = count;
  static constexpr bool kFirst = first == 0;
  static JS_INLINE constexpr int lane(int v) { return (first + v) * kLanes; }
};

using AllOutputs = Outputs<0, kPanel / kLanes>;

// Each format, for some outputs O: `visit`, which calls fn(k, w) for k in [k0, k1) in order, w[NV]
// being what those outputs multiply input k with. k0 is a multiple of kReduction.

// Weights stream from memory, and what the hardware prefetches ends at every 4 KiB page. So each
// block asks for the one that far ahead: some 200 ns of work, the time memory takes to answer.
constexpr int64_t kAhead = 2048;

template <class O, int64_t bytes>
JS_INLINE void prefetch_ahead(const uint8_t* block) {
  if (!O::kFirst) return;  // whoever looked at the panel's first outputs has asked already
#pragma GCC unroll 32
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + kAhead + i);
}

// Eight inputs of 4-bit codes are a word per output: input i is nibble 2 (i % 4) + i / 4, so that
// the even nibbles are the bytes of one quad of inputs and the odd ones those of the next.
JS_INLINE constexpr int nibble_shift(int i) { return 4 * (2 * (i % 4) + i / 4); }

// `count` inputs (a multiple of 8) of 4-bit codes; map(v, code bits in the low nibble and rubbish
// above) for maps that look at the low bits only, or map(v, code) with `masked`.
template <class O, bool masked, bool ahead = false, class Map, class Fn>
JS_INLINE void visit_nibbles(const uint8_t* words, int64_t k, int64_t count, Map&& map, Fn&& fn) {
  for (int64_t end = k + count; k < end; k += 8, words += kPlane4) {
    vu word[O::NV];
    if (ahead) prefetch_ahead<O, kPlane4>(words);
    for (int v = 0; v < O::NV; v++) word[v] = load<vu>((const uint32_t*)words + O::lane(v));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      vf w[O::NV];
#pragma GCC unroll 8
      for (int v = 0; v < O::NV; v++) {
        vu code = word[v] >> nibble_shift(i);
        w[v] = map(v, masked ? code & 15 : code);
      }
      fn(k + i, w);
    }
  }
}

// 16 inputs whose codes have `high_bits` (1 or 2) more bits than a nibble. A word per output holds
// the high bits: those of input 4 t + j at bit 8 j + high_bits t (t counts from `quad`), so one
// shift and one mask bring those of a whole quad to their places above the nibbles.
template <class O, int high_bits, class Fn>
JS_INLINE void visit_wide_codes(const uint8_t* high_words, int quad, const uint8_t* words, int64_t k,
                                const vf* s, const vf* b, Fn&& fn) {
  constexpr uint32_t kHigh = high_bits == 1 ? 0x10101010u : 0x30303030u;
#pragma GCC unroll 4
  for (int t = 0; t < 4; t++) {
    int at = high_bits * (quad + t);
    vu codes[O::NV];
    for (int v = 0; v < O::NV; v++) {
      vu low = load<vu>((const uint32_t*)(words + t / 2 * kPlane4) + O::lane(v));
      vu high = load<vu>((const uint32_t*)high_words + O::lane(v));
      vu moved = at < 4 ? high << (4 - at) : high >> (at - 4);
      codes[v] = ((t % 2 ? low >> 4 : low) & 0x0f0f0f0fu) | (moved & kHigh);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      vf w[O::NV];
#pragma GCC unroll 8
      for (int v = 0; v < O::NV; v++) {
        vu code = codes[v] >> (8 * j);
        w[v] = fma(to_float(j == 3 ? code : code & 255), s[v], b[v]);
      }
      fn(k + 4 * t + j, w);
    }
  }
}

template <class O>
JS_INLINE void load_halves(const uint8_t* p, vf* out) {
  for (int v = 0; v < O::NV; v++) out[v] = load_half(p + 2 * O::lane(v));
}

template <class O>
struct DenseF32 {
  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    for (int64_t k = k0; k < k1; k++) {
      vf w[O::NV];
      prefetch_ahead<O, 4 * kPanel>(panel + 4 * k * kPanel);
      for (int v = 0; v < O::NV; v++) w[v] = load<vf>((const float*)panel + k * kPanel + O::lane(v));
      fn(k, w);
    }
  }
};

template <class O>
struct DenseBF16 {
  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    for (int64_t k = k0; k < k1; k++) {
      vf w[O::NV];
      prefetch_ahead<O, 2 * kPanel>(panel + 2 * k * kPanel);
      for (int v = 0; v < O::NV; v++) w[v] = load_bf16(panel + 2 * (k * kPanel + O::lane(v)));
      fn(k, w);
    }
  }
};

template <class O>
struct DenseF16 {
  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    for (int64_t k = k0; k < k1; k++) {
      vf w[O::NV];
      prefetch_ahead<O, 2 * kPanel>(panel + 2 * k * kPanel);
      load_halves<O>(panel + 2 * k * kPanel, w);
      fn(k, w);
    }
  }
};

// Bytes of a group of inputs: float32 scales [32], zero points [32], codes.
template <class Fn>
JS_INLINE void visit_groups(const Matrix& m, int64_t group_bytes, int64_t k0, int64_t k1, Fn&& fn) {
  for (int64_t k = k0; k < k1;) {
    int64_t g = k / m.group, end = (g + 1) * m.group;
    if (end > k1) end = k1;
    fn(g * group_bytes, k - g * m.group, k, end);
    k = end;
  }
}

template <class O>
struct Int4 {
  template <class Fn>
  static JS_INLINE void visit(const Matrix& m, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    visit_groups(m, 5 * kPanel + m.group * 16, k0, k1,
                 [&](int64_t offset, int64_t inside, int64_t k, int64_t end) JS_INLINE_LAMBDA {
      const uint8_t* p = panel + offset;
      vf s[O::NV], b[O::NV];
      for (int v = 0; v < O::NV; v++) {
        s[v] = load<vf>((const float*)p + O::lane(v));
        b[v] = -(load_u8(p + 4 * kPanel + O::lane(v)) * s[v]);
      }
      visit_nibbles<O, true, true>(p + 5 * kPanel + inside * 16, k, end - k,
                    [&](int v, vu q) JS_INLINE_LAMBDA { return fma(to_float(q), s[v], b[v]); },
                    fn);
    });
  }
};

template <class O>
struct Int8 {
  template <class Fn>
  static JS_INLINE void visit(const Matrix& m, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    visit_groups(m, 5 * kPanel + m.group * kPanel, k0, k1,
                 [&](int64_t offset, int64_t inside, int64_t k, int64_t end) JS_INLINE_LAMBDA {
      const uint8_t* p = panel + offset;
      vf s[O::NV], b[O::NV];
      for (int v = 0; v < O::NV; v++) {
        s[v] = load<vf>((const float*)p + O::lane(v));
        b[v] = -(load_i8(p + 4 * kPanel + O::lane(v)) * s[v]);
      }
      const uint8_t* codes = p + 5 * kPanel + inside * kPanel;
      for (; k < end; k++, codes += kPanel) {
        vf w[O::NV];
        if (k % 2 == 0) prefetch_ahead<O, 2 * kPanel>(codes);
        for (int v = 0; v < O::NV; v++) w[v] = fma(load_i8(codes + O::lane(v)), s[v], b[v]);
        fn(k, w);
      }
    });
  }
};

// e4m3 (bias 7) widened by its bits: the exponent is rebased for normal numbers; subnormal ones
// are whole multiples of 2^-9. The two NaN codes are refused when a checkpoint is loaded.
JS_INLINE vf e4m3_to_float(vu byte) {
  vu magnitude = byte & 0x7f;
  vu normal = (magnitude << 20) + (120u << 23);
  vu subnormal = (vu)(to_float(magnitude) * 0x1p-9f);
  vu is_small = (vu)((vi)magnitude < 8);
  return as_float((subnormal & is_small) | (normal & ~is_small) | ((byte & 0x80) << 24));
}

template <class O>
struct Fp8 {
  template <class Fn>
  static JS_INLINE void visit(const Matrix& m, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    visit_groups(m, 4 * kPanel + m.group * kPanel, k0, k1,
                 [&](int64_t offset, int64_t inside, int64_t k, int64_t end) JS_INLINE_LAMBDA {
      const uint8_t* p = panel + offset;
      vf s[O::NV];
      for (int v = 0; v < O::NV; v++) s[v] = load<vf>((const float*)p + O::lane(v));
      const uint8_t* codes = p + 4 * kPanel + inside * kPanel;
      for (; k < end; k++, codes += kPanel) {
        vf w[O::NV];
        for (int v = 0; v < O::NV; v++) {
          w[v] = e4m3_to_float(load_u8_as_int(codes + O::lane(v))) * s[v];
        }
        fn(k, w);
      }
    });
  }
};

// Blocks of 32 with float16 scales [32], minima [32] if has_min, high bits [32] words if five
// bits, nibbles.
template <class O, bool has_min, bool five, int zero>
struct Legacy {
  static constexpr int64_t kBytes =
      (has_min ? 4 : 2) * kPanel + (five ? 4 * kPanel : 0) + 4 * kPlane4;

  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    const uint8_t* p = panel + k0 / 32 * kBytes;
    for (int64_t k = k0; k < k1; k += 32, p += kBytes) {
      vf s[O::NV], b[O::NV];
      prefetch_ahead<O, kBytes>(p);
      load_halves<O>(p, s);
      if (has_min) {
        load_halves<O>(p + 2 * kPanel, b);
      } else {
        for (int v = 0; v < O::NV; v++) b[v] = s[v] * (float)-zero;
      }
      const uint8_t* codes = p + (has_min ? 4 : 2) * kPanel;
      if (five) {
        for (int half = 0; half < 2; half++)
          visit_wide_codes<O, 1>(codes, 4 * half, codes + 4 * kPanel + 2 * half * kPlane4,
                              k + 16 * half, s, b, fn);
      } else {
        visit_nibbles<O, true>(codes, k, 32,
                            [&](int v, vu q) JS_INLINE_LAMBDA { return fma(to_float(q), s[v], b[v]); },
                            fn);
      }
    }
  }
};

template <class O>
using Q4_0 = Legacy<O, false, false, 8>;
template <class O>
using Q4_1 = Legacy<O, true, false, 0>;
template <class O>
using Q5_0 = Legacy<O, false, true, 16>;
template <class O>
using Q5_1 = Legacy<O, true, true, 0>;

template <class O>
struct Q8_0 {
  static constexpr int64_t kBytes = 2 * kPanel + 32 * kPanel;

  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    const uint8_t* p = panel + k0 / 32 * kBytes;
    for (int64_t k = k0; k < k1; k += 32, p += kBytes) {
      vf s[O::NV];
      prefetch_ahead<O, kBytes>(p);
      load_halves<O>(p, s);
#pragma GCC unroll 4
      for (int i = 0; i < 32; i++) {
        vf w[O::NV];
        for (int v = 0; v < O::NV; v++)
          w[v] = load_i8(p + 2 * kPanel + i * kPanel + O::lane(v)) * s[v];
        fn(k + i, w);
      }
    }
  }
};

// Super-blocks of 256: float16 scales d [32] and dmin [32], 8 sub-blocks' scales [8][32] and
// minima [8][32] as bytes, then per sub-block of 32 the high bits if five, and nibbles.
template <class O, bool five>
struct KQuant {
  static constexpr int64_t kSub = (five ? 4 * kPanel : 0) + 4 * kPlane4;
  static constexpr int64_t kBytes = 4 * kPanel + 16 * kPanel + 8 * kSub;

  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    const uint8_t* p = panel + k0 / 256 * kBytes;
    vf d[O::NV], dmin[O::NV];
    load_halves<O>(p, d);
    load_halves<O>(p + 2 * kPanel, dmin);
    for (int j = 0; j < 8 && k0 + 32 * j < k1; j++) {
      vf s[O::NV], b[O::NV];
      for (int v = 0; v < O::NV; v++) {
        s[v] = d[v] * load_u8(p + (4 + j) * kPanel + O::lane(v));
        b[v] = -(dmin[v] * load_u8(p + (12 + j) * kPanel + O::lane(v)));
      }
      const uint8_t* codes = p + 20 * kPanel + j * kSub;
      prefetch_ahead<O, kSub>(codes);
      if (five) {
        for (int half = 0; half < 2; half++)
          visit_wide_codes<O, 1>(codes, 4 * half, codes + 4 * kPanel + 2 * half * kPlane4,
                              k0 + 32 * j + 16 * half, s, b, fn);
      } else {
        visit_nibbles<O, true>(codes, k0 + 32 * j, 32,
                            [&](int v, vu q) JS_INLINE_LAMBDA { return fma(to_float(q), s[v], b[v]); },
                            fn);
      }
    }
  }
};

template <class O>
using Q4_K = KQuant<O, false>;
template <class O>
using Q5_K = KQuant<O, true>;

// Super-blocks of 256: float16 d [32], 16 sub-blocks' signed scales [16][32], then per sub-block
// of 16 the two high bits [32] words, and nibbles.
template <class O>
struct Q6_K {
  static constexpr int64_t kSub = 4 * kPanel + 2 * kPlane4;
  static constexpr int64_t kBytes = 2 * kPanel + 16 * kPanel + 16 * kSub;

  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    const uint8_t* p = panel + k0 / 256 * kBytes;
    vf d[O::NV];
    load_halves<O>(p, d);
    for (int j = 0; j < 16 && k0 + 16 * j < k1; j++) {
      vf s[O::NV], b[O::NV];
      for (int v = 0; v < O::NV; v++) {
        s[v] = d[v] * load_i8(p + (2 + j) * kPanel + O::lane(v));
        b[v] = s[v] * -32.0f;
      }
      const uint8_t* codes = p + 18 * kPanel + j * kSub;
      prefetch_ahead<O, kSub>(codes);
      visit_wide_codes<O, 2>(codes, 0, codes + 4 * kPanel, k0 + 16 * j, s, b, fn);
    }
  }
};

// Blocks of 32: e8m0 scales [32] (a power of two each), nibbles that are e2m1 numbers.
template <class O>
struct MXFP4 {
  static constexpr int64_t kBytes = kPanel + 4 * kPlane4;

  // 0, 1/2, 1, 3/2, 2, 3, 4, 6 by the low three bits; the fourth is the sign. Higher bits are
  // ignored.
  static JS_INLINE vf e2m1_to_float(vu q) {
#if defined(__AVX2__) && JS_LANES == 8
    const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    vu magnitude = (vu)_mm256_permutevar8x32_ps(table, (__m256i)q);
    return as_float(magnitude ^ ((q << 28) & 0x80000000u));
#else
    vu magnitude = q & 7;
    vu normal = (magnitude << 22) + (126u << 23);
    vu small = (vu)(to_float(magnitude) * 0.5f);
    vu is_small = (vu)((vi)magnitude < 2);
    return as_float((small & is_small) | (normal & ~is_small) | ((q & 8) << 28));
#endif
  }

  // 2^(e - 127) as two factors, so that the smallest scales need no subnormal number.
  static JS_INLINE vf e8m0_to_float(vu e) {
    vu half = e >> 1;
    return as_float((half + 64) << 23) * as_float((e - half + 63) << 23);
  }

  template <class Fn>
  static JS_INLINE void visit(const Matrix&, const uint8_t* panel, int64_t k0, int64_t k1, Fn&& fn) {
    const uint8_t* p = panel + k0 / 32 * kBytes;
    for (int64_t k = k0; k < k1; k += 32, p += kBytes) {
      vf s[O::NV];
      prefetch_ahead<O, kBytes>(p);
      for (int v = 0; v < O::NV; v++)
        s[v] = e8m0_to_float(load_u8_as_int(p + O::lane(v)));
      visit_nibbles<O, false>(p + kPanel, k, 32,
                    [&](int v, vu q) JS_INLINE_LAMBDA { return e2m1_to_float(q) * s[v]; }, fn);
    }
  }
};

// ---- few rows: expand in registers, multiply there ----

template <class Format, int M>
void few_rows(const Matrix& w, const uint8_t* panel, const float* x, float* sums) {
  constexpr int NV = AllOutputs::NV;
  vf sum[M][NV] = {};
  for (int64_t k0 = 0; k0 < w.k; k0 += kReduction) {
    int64_t k1 = k0 + kReduction < w.k ? k0 + kReduction : w.k;
    vf chain[M][NV] = {};
    Format::visit(w, panel, k0, k1, [&](int64_t k, const vf* column) JS_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        vf a = splat(x[m * w.k + k]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) chain[m][v] = fma(column[v], a, chain[m][v]);
      }
    });
    for (int m = 0; m < M; m++)
      for (int v = 0; v < NV; v++) sum[m][v] += chain[m][v];
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < NV; v++) store(sums + m * kPanel + v * kLanes, sum[m][v]);
}

// ---- more rows: kColumns outputs at a time; the first rows as above, and what they expanded is
// kept in a tile in the cache for the others ----

#if JS_LANES == 16
constexpr int kRows = 12, kColumns = 32;
#else
constexpr int kRows = 6, kColumns = 16;
#endif
constexpr int CV = kColumns / kLanes;
static_assert(kPanel == kColumns || kPanel == 2 * kColumns);
constexpr int kFirstRows = 4;  // expanding takes registers too
constexpr int kNoTile = 6;     // up to so many rows need no tile: the first block has them all

// Where a block of rows reads inputs and adds up outputs: x at its first row and input; sums
// [rows][kPanel] at its first row and output.
struct Block {
  const float* x;
  int64_t stride;
  float* sums;

  JS_INLINE Block from_row(int64_t m) const { return {x + m * stride, stride, sums + m * kPanel}; }
};

template <int M>
JS_INLINE void add_to(float* sums, const vf (*chain)[CV]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
    for (int v = 0; v < CV; v++) {
      float* out = sums + m * kPanel + v * kLanes;
      store(out, load<vf>(out) + chain[m][v]);
    }
}

// Inputs [k0, k1) of the first M rows; keep: what is expanded goes to tile [k1 - k0][kColumns] too.
template <class Format, int M, bool keep>
void expand_and_multiply(const Matrix& w, const uint8_t* panel, int64_t k0, int64_t k1,
                         const Block& at, float* tile) {
  vf c[M][CV] = {};
  const float* x = at.x - k0;
  const int64_t stride = at.stride;
  Format::visit(w, panel, k0, k1, [&](int64_t k, const vf* column) JS_INLINE_LAMBDA {
    if (keep)
      for (int v = 0; v < CV; v++) store(tile + (k - k0) * kColumns + v * kLanes, column[v]);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      vf a = splat(x[m * stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < CV; v++) c[m][v] = fma(column[v], a, c[m][v]);
    }
  });
  add_to<M>(at.sums, c);
}

// The same from a tile.
template <int M>
void multiply(const float* tile, int64_t depth, const Block& at) {
  vf c[M][CV] = {};
  const float* x = at.x;
  const int64_t stride = at.stride;
  for (int64_t k = 0; k < depth; k++) {
    vf w[CV];
    for (int v = 0; v < CV; v++) w[v] = load<vf>(tile + k * kColumns + v * kLanes);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      vf a = splat(x[m * stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < CV; v++) c[m][v] = fma(w[v], a, c[m][v]);
    }
  }
  add_to<M>(at.sums, c);
}

typedef void (*Multiply)(const float*, int64_t, const Block&);

const Multiply kMultiply[] = {
    nullptr,
    multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>,
#if JS_LANES == 16
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
#endif
};

// All rows with the outputs of one Format.
template <class Format>
JS_INLINE void all_rows(const Matrix& w, const uint8_t* panel, int64_t k0, int64_t k1,
                        const Block& at, int64_t rows, float* tile) {
  static_assert(kFirstRows == 4 && kNoTile == 6);
  switch (rows) {
    case 4: return expand_and_multiply<Format, 4, false>(w, panel, k0, k1, at, tile);
    case 5: return expand_and_multiply<Format, 5, false>(w, panel, k0, k1, at, tile);
    case 6: return expand_and_multiply<Format, 6, false>(w, panel, k0, k1, at, tile);
  }
  expand_and_multiply<Format, kFirstRows, true>(w, panel, k0, k1, at, tile);
  int64_t others = rows - kFirstRows, blocks = (others + kRows - 1) / kRows;
  for (int64_t b = 0; b < blocks; b++) {  // of nearly equal height
    int64_t m0 = b * others / blocks, m1 = (b + 1) * others / blocks;
    kMultiply[m1 - m0](tile, k1 - k0, at.from_row(kFirstRows + m0));
  }
}

// Asks for the packed bytes of the tile that begins at input k, which may be the next panel's first:
// they arrive while the present tile is multiplied.
void prefetch_tile(const Matrix& w, const uint8_t* panel, int64_t k) {
  const uint8_t* next = panel + w.panel_bytes * k / w.k;
  int64_t bytes = w.panel_bytes * kReduction / w.k;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
}

template <template <class> class Format>
void many_rows(const Matrix& w, const uint8_t* panel, const float* x, int64_t rows, float* sums) {
  alignas(64) float tile[kReduction * kColumns];
  std::memset(sums, 0, rows * kPanel * sizeof(float));
  for (int64_t k0 = 0; k0 < w.k; k0 += kReduction) {
    int64_t k1 = k0 + kReduction < w.k ? k0 + kReduction : w.k;
    prefetch_tile(w, panel, k1);
    all_rows<Format<Outputs<0, CV>>>(w, panel, k0, k1, {x + k0, w.k, sums}, rows, tile);
    if constexpr (kPanel > kColumns)
      all_rows<Format<Outputs<CV, CV>>>(w, panel, k0, k1, {x + k0, w.k, sums + kColumns}, rows, tile);
  }
}

template <template <class> class Format>
void one_panel(const Matrix& w, int64_t index, const float* x, int64_t rows, float* sums) {
  const uint8_t* panel = w.panels + index * w.panel_bytes;
  switch (rows) {
    case 1: return few_rows<Format<AllOutputs>, 1>(w, panel, x, sums);
    case 2: return few_rows<Format<AllOutputs>, 2>(w, panel, x, sums);
    case 3: return few_rows<Format<AllOutputs>, 3>(w, panel, x, sums);
    default: return many_rows<Format>(w, panel, x, rows, sums);
  }
}

template <template <class> class Format>
void one_row(const Matrix& w, int64_t row, float* out) {
  const uint8_t* panel = w.panels + row / kPanel * w.panel_bytes;
  int lane = row % kPanel;
  for (int64_t k0 = 0; k0 < w.k; k0 += kReduction) {
    int64_t k1 = k0 + kReduction < w.k ? k0 + kReduction : w.k;
    Format<AllOutputs>::visit(w, panel, k0, k1, [&](int64_t k, const vf* column) JS_INLINE_LAMBDA {
      alignas(64) float all[kPanel];
      for (int v = 0; v < AllOutputs::NV; v++) store(all + v * kLanes, column[v]);
      out[k] = all[lane];
    });
  }
}

template <template <template <class> class> class Call, class... Args>
JS_INLINE void by_format(int format, Args&&... args) {
  switch (format) {
    case 0: return Call<DenseF32>::run(args...);
    case 1: return Call<DenseBF16>::run(args...);
    case 2: return Call<DenseF16>::run(args...);
    case 10: return Call<Int4>::run(args...);
    case 11: return Call<Int8>::run(args...);
    case 12: return Call<Fp8>::run(args...);
    case 20: return Call<Q4_0>::run(args...);
    case 21: return Call<Q4_1>::run(args...);
    case 22: return Call<Q5_0>::run(args...);
    case 23: return Call<Q5_1>::run(args...);
    case 24: return Call<Q8_0>::run(args...);
    case 25: return Call<Q4_K>::run(args...);
    case 26: return Call<Q5_K>::run(args...);
    case 27: return Call<Q6_K>::run(args...);
    case 28: return Call<MXFP4>::run(args...);
  }
}

template <template <class> class Format>
struct PanelCall {
  static void run(const Matrix& w, int64_t p, const float* x, int64_t rows, float* sums) {
    one_panel<Format>(w, p, x, rows, sums);
  }
};

template <template <class> class Format>
struct RowCall {
  static void run(const Matrix& w, int64_t row, float* out) { one_row<Format>(w, row, out); }
};

void panel(const Matrix& w, int64_t p, const float* x, int64_t rows, float* sums) {
  by_format<PanelCall>(w.format, w, p, x, rows, sums);
}

void put(const float* sums, int64_t rows, int64_t width, const float* addend, float* y,
         int64_t stride) {
  for (int64_t m = 0; m < rows; m++, sums += kPanel, y += stride) {
    const float* more = addend == nullptr ? nullptr : addend + m * stride;
    if (width < kPanel) {
      for (int64_t i = 0; i < width; i++) y[i] = more == nullptr ? sums[i] : more[i] + sums[i];
      continue;
    }
    for (int i = 0; i < kPanel; i += kLanes) {
      vf sum = load<vf>(sums + i);
      store(y + i, more == nullptr ? sum : load<vf>(more + i) + sum);
    }
  }
}

void take_row(const Matrix& w, int64_t row, float* out) { by_format<RowCall>(w.format, w, row, out); }

}  // namespace

extern const MatmulKernels matmul_kernels = {panel, put, take_row};

}  // namespace JS_ISA
}  // namespace jaxserve
