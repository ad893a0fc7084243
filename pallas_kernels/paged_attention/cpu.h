// The kernels of paged attention, as plain functions: what the handler calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../native/isa.h"

namespace jaxserve {

constexpr int kBlock = 64;        // positions whose softmax is one unit, counted from position 0
constexpr int kMaxVectors = 96;   // query vectors (a query of one head) of a KV head in one tile
constexpr int kMaxHeadDim = 1024;

enum class PageType { kFloat32, kBFloat16, kInt8 };

// Pages [num_pages, page_size, num_kv_heads, head_dim]; scales [num_pages, page_size, num_kv_heads]
// of int8 pages, else null.
struct Pages {
  PageType type;
  void* keys;
  void* values;
  float* key_scales;
  float* value_scales;
  int64_t num_pages, page_size, num_kv_heads, head_dim;
};

struct Queries {
  const float* q;  // [T, num_heads, head_dim]
  float* out;      // like q
  int64_t num_heads;
  float scale;
  int64_t window;      // 0: none
  float softcap;       // 0: none
  const float* sinks;  // [num_heads] or null
};

// One row, its lengths already made to fit the arrays. Query i stands at kv_len - query_len + i.
struct Row {
  const int32_t* pages;
  int64_t first_token, query_len, kv_len;
  const uint8_t* tree;  // [width, width] or null
  int64_t width;
};

// Queries [q0, q1) of a row, for the heads of KV heads [kv_head0, kv_head1), over blocks
// [block0, block1). Its vectors: per KV head, per query, the heads of the group.
struct Tile {
  int64_t kv_head0, kv_head1, q0, q1, block0, block1;
};

// head_dim with room for whole vectors of any instruction set.
static inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Floats of what one block says about one query vector: weighted values, maximum, total.
static inline int64_t partial_floats(int64_t head_dim) { return padded_dim(head_dim) + 16; }

// vectors: of all KV heads of a tile.
static inline int64_t scratch_floats(int64_t vectors, int64_t head_dim) {
  return 2 * (vectors + kBlock + 8) * (padded_dim(head_dim) + 16) + 16 * kBlock;
}

static inline int64_t first_own(const Row& row) { return row.kv_len - row.query_len; }

// The first position that query i may see.
static inline int64_t first_visible(const Queries& a, const Row& row, int64_t i) {
  int64_t own = first_own(row), at = own + i - a.window + 1;
  if (a.window == 0 || at < 0) return 0;
  return row.tree != nullptr && own < at ? own : at;
}

// One past the last position that query i may see.
static inline int64_t end_visible(const Row& row, int64_t i) {
  return row.tree != nullptr ? row.kv_len : first_own(row) + i + 1;
}

struct PagedAttentionKernels {
  // Store tokens [t0, t1) of k and v [T, num_kv_heads, head_dim] in their slots; slots outside the
  // pages are skipped.
  void (*write)(const Pages& pages, const float* k, const float* v, const int32_t* slots, int64_t t0,
                int64_t t1);
  // The whole of a tile, into queries.out; or, if partials is not null, what each block says, into
  // partials[(block * vectors + vector) * partial_floats]. scratch: 64-byte aligned.
  void (*attend)(const Pages& pages, const Queries& queries, const Row& row, const Tile& tile,
                 float* partials, float* scratch);
  // Join the partials of blocks [tile.block0, tile.block1), partials[0] being block0's, into
  // queries.out.
  void (*join)(const Pages& pages, const Queries& queries, const Row& row, const Tile& tile,
               const float* partials, float* scratch);
};

}  // namespace jaxserve

JS_KERNEL_TABLE(PagedAttentionKernels, paged_attention_kernels)
