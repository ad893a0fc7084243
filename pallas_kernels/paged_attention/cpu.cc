// Attention over pages, in one fixed order of operations per query.
//
// Positions are cut into blocks of 64, counted from position 0. A query vector q (one query of one
// head, already multiplied by the scale) says of each block, whatever else is computed beside it:
//   s[j] = fma chain over d of q[d] k[j][d]        lanes are keys
//   m = max s,  p[j] = exp(s[j] - m),  l = sum p   vector after vector, then a tree over the lanes
//   c[d] = fma chain over j of p[j] v[j][d]        lanes are dimensions
// and the blocks are joined one after the other by `merge` (online softmax, arXiv:1805.02867). Keys
// that a query may not see have p = 0, which adds exactly nothing, and a block without visible keys
// is left out. So neither the tile of queries, nor the place of pages, nor the chunk, nor the kind
// of row can change a bit.
//
// A tile is some queries times the heads that share a KV head; of a decode row, all its heads, so
// that pages are read from end to end. Keys of a block are transposed into the L1 cache; values are
// copied there if the tile is large, else read where they lie.
#include "cpu.h"

#include "../native/vector_math.h"

namespace jaxserve {
namespace JS_ISA {
namespace {

#define JS_OUTLINE __attribute__((noinline))  // one copy of the code: one choice of roundings

// Masked scores lie far below the initial maximum, so that exp(masked - maximum) is exactly 0.
constexpr float kMasked = -1e30f;
constexpr float kInitialMax = -1e29f;

// ---- vector helpers ----

// The larger; b where a is NaN.
JS_INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }

JS_INLINE vi lane_bits() {
  vi bits;
  for (int i = 0; i < kLanes; i++) bits[i] = 1 << i;
  return bits;
}

// ---- elements of pages ----

// `vector`: kLanes of them as float32; `part`: a row of the squares that are transposed.
#if defined(__AVX2__)
constexpr int kSquare = 8;
typedef __m256 vpart;
#else
constexpr int kSquare = 4;
typedef vf vpart;
#endif

struct F32 {
  static constexpr int kBytes = 4;
  static JS_INLINE vf vector(const uint8_t* p) { return load<vf>(p); }
  static JS_INLINE float one(const uint8_t* p) { return load<float>(p); }
  static JS_INLINE vpart part(const uint8_t* p) {
#if defined(__AVX2__)
    return _mm256_loadu_ps((const float*)p);
#else
    return vector(p);
#endif
  }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static JS_INLINE vf vector(const uint8_t* p) { return load_bf16(p); }
  static JS_INLINE float one(const uint8_t* p) {
    uint32_t bits = (uint32_t)load<uint16_t>(p) << 16;
    return load<float>(&bits);
  }
  static JS_INLINE vpart part(const uint8_t* p) {
#if defined(__AVX2__)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
    return vector(p);
#endif
  }
};

struct I8 {
  static constexpr int kBytes = 1;
  static JS_INLINE vf vector(const uint8_t* p) { return load_i8(p); }
  static JS_INLINE float one(const uint8_t* p) { return (float)(int8_t)*p; }
  static JS_INLINE vpart part(const uint8_t* p) {
#if defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return vector(p);
#endif
  }
};

#if defined(__AVX2__)
JS_INLINE void transpose(vpart* r) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
#else
JS_INLINE void transpose(vpart* r) {
  float rows[4][4];
  for (int i = 0; i < 4; i++) store(rows[i], r[i]);
  for (int i = 0; i < 4; i++) r[i] = vf{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
}
#endif

// out[d][j] = rows[j][d] for j in [j0, j1), both multiples of kSquare; calls between(j) on the way.
template <class Elem, class Between>
JS_INLINE void pack_keys(const uint8_t* const* rows, int64_t dim, int64_t j0, int64_t j1, float* out,
                         Between&& between) {
  int64_t whole = dim / kSquare * kSquare;
  for (int64_t j = j0; j < j1; j += kSquare) {
    between(j);
    for (int64_t d = 0; d < whole; d += kSquare) {
      vpart r[kSquare];
#pragma GCC unroll 8
      for (int i = 0; i < kSquare; i++) r[i] = Elem::part(rows[j + i] + d * Elem::kBytes);
      transpose(r);
#pragma GCC unroll 8
      for (int i = 0; i < kSquare; i++) store(out + (d + i) * kBlock + j, r[i]);
    }
    for (int64_t d = whole; d < dim; d++)
      for (int i = 0; i < kSquare; i++)
        out[d * kBlock + j + i] = Elem::one(rows[j + i] + d * Elem::kBytes);
  }
}

// out[j][d] = rows[j][d] for j in [j0, j1), zero in [dim, stride).
template <class Elem>
void pack_values(const uint8_t* const* rows, int64_t dim, int64_t j0, int64_t j1, float* out,
                 int64_t stride) {
  int64_t whole = dim / kLanes * kLanes;
  for (int64_t j = j0; j < j1; j++) {
    float* to = out + j * stride;
    for (int64_t d = 0; d < whole; d += kLanes)
      store(to + d, Elem::vector(rows[j] + d * Elem::kBytes));
    for (int64_t d = whole; d < stride; d++)
      to[d] = d < dim ? Elem::one(rows[j] + d * Elem::kBytes) : 0.0f;
  }
}

// ---- products: out[m][column] = chain over k in [k0, k1) of a[m][k] b[k][column] ----

#if JS_LANES == 16
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

struct Packed {  // float32 [depth][stride]
  const uint8_t* base;
  int64_t bytes;
  JS_INLINE Packed(const void* b, int64_t stride) : base((const uint8_t*)b), bytes(4 * stride) {}
  JS_INLINE const uint8_t* row(int64_t k) const { return base + k * bytes; }
  static JS_INLINE vf at(const uint8_t* row, int64_t v) { return F32::vector(row + v * kLanes * 4); }
};

template <class Elem>
struct InPlace {  // a pointer per row
  const uint8_t* const* rows;
  JS_INLINE InPlace(const void* b, int64_t) : rows((const uint8_t* const*)b) {}
  JS_INLINE const uint8_t* row(int64_t k) const { return rows[k]; }
  static JS_INLINE vf at(const uint8_t* row, int64_t v) {
    return Elem::vector(row + v * kLanes * Elem::kBytes);
  }
};

template <int M, int NV, class Source>
JS_INLINE void product_columns(const Source& b, const float* a, int64_t a_stride, int64_t k0,
                               int64_t k1, int64_t v, float* out, int64_t out_stride) {
  vf c[M][NV] = {};
  for (int64_t k = k0; k < k1; k++) {
    const uint8_t* row = b.row(k);
    vf column[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) column[i] = Source::at(row, v + i);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      vf x = splat(a[m * a_stride + k]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; i++) c[m][i] = fma(column[i], x, c[m][i]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) store(out + m * out_stride + (v + i) * kLanes, c[m][i]);
}

// Columns of vectors [v0, v1).
template <int M, class Source>
void product(const void* b, int64_t b_stride, const float* a, int64_t a_stride, int64_t k0,
             int64_t k1, int64_t v0, int64_t v1, float* out, int64_t out_stride) {
  constexpr int NV = M == 1 ? 8 : M <= 3 ? 4 : 2;
  Source source(b, b_stride);
  int64_t v = v0;
  for (; v + NV <= v1; v += NV)
    product_columns<M, NV>(source, a, a_stride, k0, k1, v, out, out_stride);
  for (; v + 2 <= v1; v += 2)
    product_columns<M, 2>(source, a, a_stride, k0, k1, v, out, out_stride);
  if (v < v1) product_columns<M, 1>(source, a, a_stride, k0, k1, v, out, out_stride);
}

typedef void (*Product)(const void*, int64_t, const float*, int64_t, int64_t, int64_t, int64_t,
                        int64_t, float*, int64_t);

template <class Source>
const Product* products() {
  static constexpr Product table[kRows + 1] = {
      nullptr,
      product<1, Source>, product<2, Source>, product<3, Source>, product<4, Source>,
      product<5, Source>, product<6, Source>,
#if JS_LANES == 16
      product<7, Source>, product<8, Source>, product<9, Source>, product<10, Source>,
      product<11, Source>, product<12, Source>,
#endif
  };
  return table;
}

// ---- softmax of a block, and the join of blocks ----

struct BlockSum {
  float maximum, total;
};

// scores [kBlock] become weights in the vectors [v0, v1); keys whose bit is not in `visible` get 0.
// key_scales, value_scales [kBlock]: of int8 pages, or null.
JS_OUTLINE BlockSum softmax(float* scores, uint64_t visible, int64_t v0, int64_t v1, float softcap,
                            const float* key_scales, const float* value_scales) {
  const vi lanes = lane_bits();
  alignas(64) float across[kLanes];
  vf top = splat(kMasked);
  for (int64_t v = v0; v < v1; v++) {
    vf s = load<vf>(scores + v * kLanes);
    if (key_scales != nullptr) s = s * load<vf>(key_scales + v * kLanes);
    if (softcap != 0) s = softcap * tanh_vector(s / softcap);
    vi bits = ((int32_t)(visible >> (v * kLanes)) - vi{}) & lanes;
    s = select(bits != 0, s, splat(kMasked));
    store(scores + v * kLanes, s);
    top = larger(s, top);
  }
  store(across, top);
  float maximum = across[0];
  for (int i = 1; i < kLanes; i++) maximum = across[i] > maximum ? across[i] : maximum;
  vf sum = {};
  for (int64_t v = v0; v < v1; v++) {
    vf p = exp_vector(load<vf>(scores + v * kLanes) - maximum);
    sum += p;
    if (value_scales != nullptr) p = p * load<vf>(value_scales + v * kLanes);
    store(scores + v * kLanes, p);
  }
  store(across, sum);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) across[i] += across[i + half];
  return {maximum, across[0]};
}

// One query vector's state over the blocks so far. total is 0 while nothing was seen.
struct Running {
  float maximum, total;
};

JS_OUTLINE void merge(Running* state, float* sum, const BlockSum& block, const float* values,
                      int64_t dim) {
  float maximum = state->maximum > block.maximum ? state->maximum : block.maximum;
  vf shift = {};
  shift[0] = state->maximum - maximum;
  shift[1] = block.maximum - maximum;
  vf factors = exp_vector(shift);
  float keep = factors[0], take = factors[1];
  state->maximum = maximum;
  float kept = state->total * keep;
  state->total = kept + block.total * take;
  for (int64_t d = 0; d < dim; d += kLanes) {
    vf taken = load<vf>(values + d) * take;
    store(sum + d, fma(load<vf>(sum + d), splat(keep), taken));
  }
}

void start(const Queries& a, int64_t head, Running* state, float* sum, int64_t dim) {
  *state = a.sinks == nullptr ? Running{kInitialMax, 0.0f} : Running{a.sinks[head], 1.0f};
  std::memset(sum, 0, dim * sizeof(float));
}

void finish(const Running& state, float* sum, int64_t padded, float* out, int64_t dim) {
  float total = state.total == 0 ? 1.0f : state.total;
  for (int64_t d = 0; d < padded; d += kLanes) store(sum + d, load<vf>(sum + d) / total);
  std::memcpy(out, sum, dim * sizeof(float));
}

// ---- a tile ----

// Where the rows of one block lie, and their scales.
struct BlockRows {
  const uint8_t* keys[kBlock];
  const uint8_t* values[kBlock];
  alignas(64) float key_scales[kBlock];
  alignas(64) float value_scales[kBlock];
};

alignas(64) const uint8_t kZeroRow[4 * kMaxHeadDim] = {};

// Positions base + [j0, j1) of one KV head; the rest of the block is a row of zeros. A page id that
// is not one reads page 0.
void find_rows(const Pages& pages, const Row& row, int64_t kv_head, int64_t base, int64_t j0,
               int64_t j1, int64_t elem_bytes, BlockRows* rows) {
  bool scaled = pages.type == PageType::kInt8;
  for (int64_t j = 0; j < kBlock; j++) {
    if (j >= j0 && j < j1) continue;
    rows->keys[j] = rows->values[j] = kZeroRow;
    rows->key_scales[j] = rows->value_scales[j] = 0.0f;
  }
  int64_t page_size = pages.page_size, index = (base + j0) / page_size;
  int64_t offset = (base + j0) % page_size;
  int64_t row_bytes = pages.head_dim * elem_bytes;
  for (int64_t j = j0; j < j1; index++, offset = 0) {
    int64_t page = row.pages[index];
    if (page < 0 || page >= pages.num_pages) page = 0;
    for (; j < j1 && offset < page_size; j++, offset++) {
      int64_t at = (page * page_size + offset) * pages.num_kv_heads + kv_head;
      rows->keys[j] = (const uint8_t*)pages.keys + at * row_bytes;
      rows->values[j] = (const uint8_t*)pages.values + at * row_bytes;
      if (scaled) {
        rows->key_scales[j] = pages.key_scales[at];
        rows->value_scales[j] = pages.value_scales[at];
      }
    }
  }
}

// Asks for the bytes of a token's KV heads ahead of use, in the order in which they lie in memory:
// hardware does not foresee the way from page to page, nor from a head's row to its next.
struct Ahead {
  const Pages& pages;
  const Row& row;
  int64_t kv_head, bytes, elem_bytes;

  void ask(int64_t p0, int64_t p1) const {
    for (int64_t p = p0; p < p1 && p < row.kv_len; p++) {
      int64_t page = row.pages[p / pages.page_size];
      if (page < 0 || page >= pages.num_pages) return;
      int64_t slot = page * pages.page_size + p % pages.page_size;
      int64_t at = (slot * pages.num_kv_heads + kv_head) * pages.head_dim * elem_bytes;
      const char* key = (const char*)pages.keys + at;
      const char* value = (const char*)pages.values + at;
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(key + i, 0, 2);
        __builtin_prefetch(value + i, 0, 2);
      }
    }
  }
};

JS_INLINE uint64_t bits_between(int64_t lo, int64_t hi) {  // bits [lo, hi) of 64
  if (lo < 0) lo = 0;
  if (hi > kBlock) hi = kBlock;
  if (lo >= hi) return 0;
  uint64_t below = hi == 64 ? ~0ull : (1ull << hi) - 1;
  return below & ~((1ull << lo) - 1);
}

// Which positions base + [0, 64) query i sees.
uint64_t visible_keys(const Queries& a, const Row& row, int64_t i, int64_t base) {
  int64_t own = first_own(row);
  if (row.tree == nullptr)
    return bits_between(first_visible(a, row, i) - base, end_visible(row, i) - base);
  int64_t lo = a.window == 0 ? 0 : own + i - a.window + 1;
  uint64_t bits = bits_between(lo - base, own - base);
  for (int64_t n = 0; n < row.query_len; n++) {
    int64_t at = own + n - base;
    if (at >= 0 && at < kBlock && row.tree[i * row.width + n]) bits |= 1ull << at;
  }
  return bits;
}

// Carves arrays out of the scratch, each on a 64-byte line.
struct Scratch {
  float* next;
  float* take(int64_t floats) {
    float* at = next;
    next += (floats + 15) / 16 * 16;
    return at;
  }
};

// The arrays a tile works in.
struct Workspace {
  float* queries;    // [KV heads of the tile][vectors][padded], scaled
  float* sums;       // likewise: what the blocks so far add up to
  Running* states;   // [KV heads of the tile][vectors]
  float* keys;       // [dim][kBlock]
  float* values;     // [kBlock][padded]
  float* scores;     // [kRows][kBlock]
  float* weighted;   // [kRows][padded]
};

struct TileShape {
  int64_t dim, padded, group, heads, vectors;  // vectors of one KV head; heads: KV heads

  TileShape(const Pages& pages, const Queries& a, const Tile& tile)
      : dim(pages.head_dim),
        padded(padded_dim(dim)),
        group(a.num_heads / pages.num_kv_heads),
        heads(tile.kv_head1 - tile.kv_head0),
        vectors((tile.q1 - tile.q0) * group) {}

  int64_t head_of(const Tile& tile, int64_t h, int64_t m) const {
    return (tile.kv_head0 + h) * group + m % group;
  }

  // Where vector m of KV head h lies in q and out.
  int64_t offset(const Queries& a, const Row& row, const Tile& tile, int64_t h, int64_t m) const {
    int64_t token = row.first_token + tile.q0 + m / group;
    return (token * a.num_heads + head_of(tile, h, m)) * dim;
  }
};

// The vectors [m0, m1) of KV head h, at most kRows, against one block.
template <class Elem>
void attend_vectors(const Pages& pages, const Queries& a, const Row& row, const Tile& tile,
                    const TileShape& shape, const BlockRows& rows, const Workspace& w, bool copied,
                    int64_t h, int64_t m0, int64_t m1, int64_t base, int64_t j0, int64_t j1,
                    float* partials) {
  const Product* on_packed = products<Packed>();
  const Product* on_values = copied ? on_packed : products<InPlace<Elem>>();
  bool scaled = pages.type == PageType::kInt8;
  int64_t padded = shape.padded, first = h * shape.vectors, v0 = j0 / 16 * 16 / kLanes;
  int64_t v1 = (j1 + 15) / 16 * 16 / kLanes;
  on_packed[m1 - m0](w.keys, kBlock, w.queries + (first + m0) * padded, padded, 0, shape.dim, v0, v1,
                     w.scores, kBlock);
  BlockSum said[kRows];
  for (int64_t m = m0; m < m1; m++) {
    float* p = w.scores + (m - m0) * kBlock;
    uint64_t visible = visible_keys(a, row, tile.q0 + m / shape.group, base);
    if (visible == 0) {
      said[m - m0] = {kMasked, 0.0f};
      std::memset(p, 0, kBlock * sizeof(float));
    } else {
      said[m - m0] = softmax(p, visible, v0, v1, a.softcap, scaled ? rows.key_scales : nullptr,
                             scaled ? rows.value_scales : nullptr);
    }
  }
  on_values[m1 - m0](copied ? (const void*)w.values : (const void*)rows.values, padded, w.scores,
                     kBlock, j0, j1, 0, (shape.dim + kLanes - 1) / kLanes, w.weighted, padded);
  for (int64_t m = m0; m < m1; m++) {
    const BlockSum& block = said[m - m0];
    const float* c = w.weighted + (m - m0) * padded;
    if (partials != nullptr) {
      float* to = partials + (first + m) * partial_floats(shape.dim);
      std::memcpy(to, c, padded * sizeof(float));
      to[padded] = block.maximum, to[padded + 1] = block.total;
    } else if (block.total != 0) {
      merge(&w.states[first + m], w.sums + (first + m) * padded, block, c, padded);
    }
  }
}

template <class Elem>
void attend_pages(const Pages& pages, const Queries& a, const Row& row, const Tile& tile,
                  float* partials, float* memory) {
  TileShape shape(pages, a, tile);
  int64_t dim = shape.dim, padded = shape.padded, all = shape.heads * shape.vectors;
  Scratch scratch{memory};
  Workspace w;
  w.queries = scratch.take(all * padded);
  w.sums = scratch.take(all * padded);
  w.states = (Running*)scratch.take(2 * all);
  w.keys = scratch.take(padded * kBlock);
  w.values = scratch.take(kBlock * padded);
  w.scores = scratch.take(kRows * kBlock);
  w.weighted = scratch.take(kRows * padded);
  std::memset(w.weighted, 0, kRows * padded * sizeof(float));  // the padding stays zero
  for (int64_t n = 0; n < all; n++) {
    int64_t h = n / shape.vectors, m = n % shape.vectors;
    const float* q = a.q + shape.offset(a, row, tile, h, m);
    for (int64_t d = 0; d < dim; d++) w.queries[n * padded + d] = q[d] * a.scale;
    start(a, shape.head_of(tile, h, m), &w.states[n], w.sums + n * padded, padded);
  }
  bool copy = shape.vectors > kRows || dim % kLanes != 0;
  Ahead ahead{pages, row, tile.kv_head0, shape.heads * dim * Elem::kBytes, Elem::kBytes};
  int64_t groups = (shape.vectors + kRows - 1) / kRows;
  for (int64_t b = tile.block0; b < tile.block1; b++) {
    int64_t base = b * kBlock, next = b + 1 < tile.block1 && !copy ? base + kBlock : row.kv_len;
    int64_t j0 = first_visible(a, row, tile.q0) - base, j1 = end_visible(row, tile.q1 - 1) - base;
    if (j0 < 0) j0 = 0;
    if (j1 > kBlock) j1 = kBlock;
    if (j1 < j0) j1 = j0 = 0;
    for (int64_t h = 0; h < shape.heads; h++) {
      BlockRows rows;
      find_rows(pages, row, tile.kv_head0 + h, base, j0, j1, Elem::kBytes, &rows);
      pack_keys<Elem>(rows.keys, dim, j0 / 16 * 16, (j1 + 15) / 16 * 16, w.keys,
                      [&](int64_t j) JS_INLINE_LAMBDA {
        int64_t at = h * kBlock + j;  // of heads * kBlock: this much of the next block
        ahead.ask(next + at / shape.heads, next + (at + kSquare) / shape.heads);
      });
      if (copy) pack_values<Elem>(rows.values, dim, j0, j1, w.values, padded);
      float* to = partials == nullptr ? nullptr
                                      : partials + (b - tile.block0) * all * partial_floats(dim);
      for (int64_t g = 0; g < groups; g++)  // of nearly equal height
        attend_vectors<Elem>(pages, a, row, tile, shape, rows, w, copy, h,
                             g * shape.vectors / groups, (g + 1) * shape.vectors / groups, base, j0,
                             j1, to);
    }
  }
  if (partials != nullptr) return;
  for (int64_t n = 0; n < all; n++) {
    int64_t at = shape.offset(a, row, tile, n / shape.vectors, n % shape.vectors);
    finish(w.states[n], w.sums + n * padded, padded, a.out + at, dim);
  }
}

void attend(const Pages& pages, const Queries& a, const Row& row, const Tile& tile, float* partials,
            float* scratch) {
  switch (pages.type) {
    case PageType::kFloat32: return attend_pages<F32>(pages, a, row, tile, partials, scratch);
    case PageType::kBFloat16: return attend_pages<BF16>(pages, a, row, tile, partials, scratch);
    case PageType::kInt8: return attend_pages<I8>(pages, a, row, tile, partials, scratch);
  }
}

void join(const Pages& pages, const Queries& a, const Row& row, const Tile& tile,
          const float* partials, float* scratch) {
  TileShape shape(pages, a, tile);
  int64_t padded = shape.padded, all = shape.heads * shape.vectors;
  for (int64_t n = 0; n < all; n++) {
    int64_t h = n / shape.vectors, m = n % shape.vectors;
    Running state;
    start(a, shape.head_of(tile, h, m), &state, scratch, padded);
    for (int64_t b = 0; b < tile.block1 - tile.block0; b++) {
      const float* c = partials + (b * all + n) * partial_floats(shape.dim);
      BlockSum said{c[padded], c[padded + 1]};
      if (said.total != 0) merge(&state, scratch, said, c, padded);
    }
    finish(state, scratch, padded, a.out + shape.offset(a, row, tile, h, m), shape.dim);
  }
}

// ---- writing ----

uint16_t to_bf16(float x) {  // nearest, ties to even; NaN stays NaN
  uint32_t bits = load<uint32_t>(&x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Codes of absmax / 127; the scale. What is not finite gives a NaN scale, so that the row is seen
// to have failed.
float quantize(const float* x, int64_t dim, int8_t* codes) {
  float largest = 0, poison = 0;
  for (int64_t d = 0; d < dim; d++) {
    float a = __builtin_fabsf(x[d]);
    largest = a > largest ? a : largest;
    poison += x[d] * 0.0f;
  }
  float scale = largest / 127.0f;
  if (poison != 0 || scale < 1.1754944e-38f) {
    for (int64_t d = 0; d < dim; d++) codes[d] = 0;
    return poison != 0 ? __builtin_nanf("") : 0.0f;
  }
  for (int64_t d = 0; d < dim; d++) codes[d] = (int8_t)__builtin_rintf(x[d] / scale);
  return scale;
}

void write_one(const Pages& pages, void* to, float* scales, const float* from, int64_t slot) {
  int64_t dim = pages.head_dim, heads = pages.num_kv_heads, size = heads * dim;
  switch (pages.type) {
    case PageType::kFloat32:
      std::memcpy((float*)to + slot * size, from, size * sizeof(float));
      return;
    case PageType::kBFloat16:
      for (int64_t i = 0; i < size; i++) ((uint16_t*)to)[slot * size + i] = to_bf16(from[i]);
      return;
    case PageType::kInt8:
      for (int64_t h = 0; h < heads; h++)
        scales[slot * heads + h] = quantize(from + h * dim, dim, (int8_t*)to + slot * size + h * dim);
      return;
  }
}

void write(const Pages& pages, const float* k, const float* v, const int32_t* slots, int64_t t0,
           int64_t t1) {
  int64_t size = pages.num_kv_heads * pages.head_dim;
  for (int64_t t = t0; t < t1; t++) {
    int64_t slot = slots[t];
    if (slot < 0 || slot >= pages.num_pages * pages.page_size) continue;
    write_one(pages, pages.keys, pages.key_scales, k + t * size, slot);
    write_one(pages, pages.values, pages.value_scales, v + t * size, slot);
  }
}

}  // namespace

extern const PagedAttentionKernels paged_attention_kernels = {write, attend, join};

}  // namespace JS_ISA
}  // namespace jaxserve
