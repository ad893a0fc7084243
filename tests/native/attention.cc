// Paged attention against the formula in double, over pages of every type; whole, by heads, and cut
// into blocks that are joined, which must be the same to the bit.
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "driver.h"

namespace jaxserve {
namespace {

constexpr int64_t kPageSize = 16, kNumPages = 11;

struct Setup {
  PageType type;
  int64_t kv_heads, group, dim, kv_len, query_len, window;
  float softcap;
  bool sinks, tree;

  std::string name() const {
    std::string text = "attention";
    for (int64_t number : {(int64_t)type, kv_heads, group, dim, kv_len, query_len, window,
                           (int64_t)softcap, (int64_t)sinks, (int64_t)tree})
      text += " " + std::to_string(number);
    return text;
  }
};

struct AlignedFloats {  // of exactly `size`, at a multiple of 64 bytes
  explicit AlignedFloats(int64_t size)
      : data((float*)::operator new[]((size_t)size * 4, std::align_val_t(64))) {}
  ~AlignedFloats() { ::operator delete[](data, std::align_val_t(64)); }
  AlignedFloats(const AlignedFloats&) = delete;
  float* data;
};

struct Pool {
  explicit Pool(const Setup& a)
      : numbers(kNumPages * kPageSize * a.kv_heads * a.dim),
        vectors(kNumPages * kPageSize * a.kv_heads),
        bytes(a.type == PageType::kFloat32 ? 4 : a.type == PageType::kBFloat16 ? 2 : 1),
        keys(numbers * bytes), values(numbers * bytes), key_scales(vectors), value_scales(vectors) {
    std::memset(keys.get(), 0, (size_t)keys.size);
    std::memset(values.get(), 0, (size_t)values.size);
    for (int64_t i = 0; i < vectors; i++) key_scales[i] = value_scales[i] = 0;
    bool scaled = a.type == PageType::kInt8;
    pages = {a.type, keys.get(), values.get(), scaled ? key_scales.get() : nullptr,
             scaled ? value_scales.get() : nullptr, kNumPages, kPageSize, a.kv_heads, a.dim};
  }

  double number(bool key, int64_t vector, int64_t i) {
    uint8_t* at = (key ? keys : values).get() + (vector * pages.head_dim + i) * bytes;
    if (pages.type == PageType::kInt8)
      return (double)(int8_t)*at * (key ? key_scales : value_scales)[vector];
    uint32_t bits = 0;
    std::memcpy((uint8_t*)&bits + 4 - bytes, at, (size_t)bytes);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  int64_t numbers, vectors, bytes;
  Exact<uint8_t> keys, values;
  Exact<float> key_scales, value_scales;
  Pages pages;
};

// The formula for one query vector: out [dim].
void attend_plainly(const Setup& a, Pool& pool, const Exact<int32_t>& table, const float* query,
                    int64_t i, int64_t head, float scale, const float* sinks, double* out) {
  int64_t position = a.kv_len - a.query_len + i;
  std::vector<double> scores, weights;
  std::vector<int64_t> at;
  double most = sinks != nullptr ? sinks[head] : -INFINITY;
  for (int64_t p = 0; p <= position; p++) {
    if (a.window != 0 && p <= position - a.window) continue;
    int64_t page = table.data[(size_t)(p / kPageSize)];
    int64_t vector = (page * kPageSize + p % kPageSize) * a.kv_heads + head / a.group;
    double score = 0;
    for (int64_t d = 0; d < a.dim; d++) score += query[d] * pool.number(true, vector, d);
    score *= scale;
    if (a.softcap != 0) score = a.softcap * std::tanh(score / a.softcap);
    scores.push_back(score), at.push_back(vector);
    most = std::fmax(most, score);
  }
  double total = sinks != nullptr ? std::exp(sinks[head] - most) : 0;
  for (double score : scores) {
    weights.push_back(std::exp(score - most));
    total += weights.back();
  }
  for (int64_t d = 0; d < a.dim; d++) {
    out[d] = 0;
    for (size_t j = 0; j < at.size(); j++) out[d] += weights[j] * pool.number(false, at[j], d);
    out[d] /= total;
  }
}

void fill_pool(const PagedAttentionKernels& kernels, const Setup& a, Pool& pool,
               Exact<int32_t>& table, const char* copy) {
  int64_t size = a.kv_heads * a.dim, tokens = a.kv_len + 2;
  Exact<float> k = random_floats(tokens * size), v = random_floats(tokens * size);
  Exact<int32_t> slots(tokens);
  for (int64_t t = 0; t < a.kv_len; t++)
    slots[t] = table[t / kPageSize] * (int32_t)kPageSize + (int32_t)(t % kPageSize);
  slots[a.kv_len] = -1, slots[a.kv_len + 1] = kNumPages * kPageSize;  // both to be skipped
  kernels.write(pool.pages, k.get(), v.get(), slots.get(), 0, tokens / 2);
  kernels.write(pool.pages, k.get(), v.get(), slots.get(), tokens / 2, tokens);
  double step = 0;  // the largest error of a number that is kept
  if (a.type == PageType::kBFloat16) step = 0x1p-8;
  if (a.type == PageType::kInt8) step = 0.5 / 126;
  for (int64_t t = 0; t < a.kv_len; t++)
    for (int64_t i = 0; i < size; i++) {
      int64_t vector = slots[t] * a.kv_heads + i / a.dim;
      check(std::fabs(pool.number(true, vector, i % a.dim) - k[t * size + i]) <= step &&
                std::fabs(pool.number(false, vector, i % a.dim) - v[t * size + i]) <= step,
            copy, a.name(), "a key or value was stored wrong");
    }
}

void check_setup(const PagedAttentionKernels& kernels, const Setup& a, const char* copy) {
  Pool pool(a);
  Exact<int32_t> table((a.kv_len + kPageSize - 1) / kPageSize);
  for (int64_t p = 0; p < table.size; p++) table[p] = (int32_t)((p * 7 + 3) % kNumPages);
  fill_pool(kernels, a, pool, table, copy);
  int64_t heads = a.kv_heads * a.group, size = heads * a.dim;
  Exact<float> q = random_floats(a.query_len * size), sinks = random_floats(heads);
  Exact<uint8_t> tree(a.query_len * a.query_len);
  for (int64_t i = 0; i < tree.size; i++) tree[i] = i % a.query_len <= i / a.query_len;
  Exact<float> out(q.size), by_head(q.size), joined(q.size);
  float scale = 1 / std::sqrt((float)a.dim);
  Row row{table.get(), 0, a.query_len, a.kv_len, a.tree ? tree.get() : nullptr, a.query_len};
  auto queries = [&](float* to) {
    return Queries{q.get(), to, heads, scale, a.window, a.softcap, a.sinks ? sinks.get() : nullptr};
  };
  Queries first = queries(out.get());
  Tile tile{0, a.kv_heads, 0, a.query_len, first_visible(first, row, 0) / kBlock,
            (end_visible(row, a.query_len - 1) + kBlock - 1) / kBlock};
  int64_t vectors = heads * a.query_len;
  AlignedFloats scratch(scratch_floats(vectors, a.dim));
  kernels.attend(pool.pages, first, row, tile, nullptr, scratch.data);
  for (int64_t h = 0; h < a.kv_heads; h++) {
    Tile one = tile;
    one.kv_head0 = h, one.kv_head1 = h + 1;
    kernels.attend(pool.pages, queries(by_head.get()), row, one, nullptr, scratch.data);
  }
  int64_t block_size = vectors * partial_floats(a.dim);
  AlignedFloats partials((tile.block1 - tile.block0) * block_size);
  for (int64_t b = tile.block0; b < tile.block1; b++) {
    Tile one = tile;
    one.block0 = b, one.block1 = b + 1;
    kernels.attend(pool.pages, queries(joined.get()), row, one,
                   partials.data + (b - tile.block0) * block_size, scratch.data);
  }
  kernels.join(pool.pages, queries(joined.get()), row, tile, partials.data, scratch.data);
  check(std::memcmp(out.get(), by_head.get(), (size_t)out.size * 4) == 0, copy, a.name(),
        "heads apart differ from heads together");
  check(std::memcmp(out.get(), joined.get(), (size_t)out.size * 4) == 0, copy, a.name(),
        "joined blocks differ from the whole");
  std::vector<double> want((size_t)a.dim);
  for (int64_t i = 0; i < a.query_len; i++)
    for (int64_t h = 0; h < heads; h++) {
      const float* query = q.get() + i * size + h * a.dim;
      attend_plainly(a, pool, table, query, i, h, scale, a.sinks ? sinks.get() : nullptr,
                     want.data());
      for (int64_t d = 0; d < a.dim; d++)
        check(std::fabs(out[i * size + h * a.dim + d] - want[(size_t)d]) <= 2e-6, copy, a.name(),
              "attention is wrong");
    }
}

}  // namespace

void check_attention(const PagedAttentionKernels& kernels, const char* copy) {
  for (PageType type : {PageType::kFloat32, PageType::kBFloat16, PageType::kInt8}) {
    for (int64_t dim : {1, 16, 20, 64})
      for (int64_t kv_len : {1, 16, 65, 130})
        for (int64_t query_len : {1, 3, 13})
          if (query_len <= kv_len)
            check_setup(kernels, {type, 2, 2, dim, kv_len, query_len, 0, 0, false, false}, copy);
    for (int64_t window : {0, 9, 70})
      for (float softcap : {0.0f, 5.0f})
        for (bool sinks : {false, true})
          for (bool tree : {false, true})
            check_setup(kernels, {type, 1, 3, 20, 130, 5, window, softcap, sinks, tree}, copy);
  }
}

}  // namespace jaxserve
