// XLA's call of paged attention: first every new key and value is stored, then every row attends.
// Shapes were checked in Python (cpu.py) and again here; lengths, page ids and slots are data, so
// they are made to fit: nothing outside the buffers is ever touched.
#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "../native/parallel.h"
#include "cpu.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

ffi::Error bad(const char* what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, what); }

// Multiply-adds below which waking another thread costs more than it saves.
constexpr int64_t kWorthSharing = 1 << 17;
constexpr int64_t kWorthCutting = 1 << 17;  // multiply-adds of a task, about 5 us
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kFewVectors = 6;  // below this a tile does not use the registers well

struct FreeAligned {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
typedef std::unique_ptr<float[], FreeAligned> Floats;

Floats make_floats(int64_t size) {
  return Floats((float*)::operator new[](size * sizeof(float), std::align_val_t(64)));
}

float* thread_scratch(int64_t size) {
  thread_local Floats memory;
  thread_local int64_t held = 0;
  if (held < size) {
    memory = make_floats(size);
    held = size;
  }
  return memory.get();
}

// The partials of one tile whose blocks were dealt out to several tasks; the last one joins them.
struct Split {
  Tile tile;
  int64_t partials;  // offset into the partials of all
  std::unique_ptr<std::atomic<int64_t>> left;
};

struct Task {
  int64_t row;
  Tile tile;
  int64_t split;  // -1: the task does the whole tile
  int64_t cost;
};

int64_t clamp(int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : x > hi ? hi : x; }

struct Step {
  Pages pages;
  Queries queries;
  std::vector<Row> rows;
  int64_t tokens, decode_rows;

  int64_t group() const { return queries.num_heads / pages.num_kv_heads; }

  // All blocks that queries [q0, q1) of a row need.
  Tile tile(const Row& row, int64_t kv_head0, int64_t kv_head1, int64_t q0, int64_t q1) const {
    return Tile{kv_head0, kv_head1, q0, q1, first_visible(queries, row, q0) / kBlock,
                (end_visible(row, q1 - 1) + kBlock - 1) / kBlock};
  }

  int64_t vectors(const Tile& t) const {
    return (t.kv_head1 - t.kv_head0) * (t.q1 - t.q0) * group();
  }

  int64_t cost(const Tile& t) const {
    return vectors(t) * (t.block1 - t.block0) * kBlock * 2 * pages.head_dim;
  }

  int64_t partial_size(const Tile& t) const {
    return (t.block1 - t.block0) * vectors(t) * partial_floats(pages.head_dim);
  }
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Split> splits;
  int64_t partials = 0;
};

// A decode row: all its KV heads at once, block after block; cut by blocks if it costs much more
// than `target`.
void plan_decode(const Step& step, int64_t r, int64_t target, Plan* plan) {
  const Row& row = step.rows[r];
  int64_t size = std::max<int64_t>(1, kMaxVectors / step.group());
  for (int64_t q0 = 0; q0 < row.query_len; q0 += size) {
    Tile tile = step.tile(row, 0, step.pages.num_kv_heads, q0, std::min(q0 + size, row.query_len));
    int64_t cost = step.cost(tile), blocks = tile.block1 - tile.block0;
    int64_t pieces = std::min(blocks, cost / target);
    if (pieces <= 1) {
      plan->tasks.push_back({r, tile, -1, cost});
      continue;
    }
    plan->splits.push_back({tile, plan->partials, std::make_unique<std::atomic<int64_t>>(pieces)});
    plan->partials += step.partial_size(tile);
    for (int64_t i = 0; i < pieces; i++) {
      Tile part = tile;
      part.block0 = tile.block0 + i * blocks / pieces;
      part.block1 = tile.block0 + (i + 1) * blocks / pieces;
      plan->tasks.push_back({r, part, (int64_t)plan->splits.size() - 1, step.cost(part)});
    }
  }
}

// A prefill row: tiles of queries of one KV head, as large as the registers and `target` like.
void plan_prefill(const Step& step, int64_t r, int64_t target, Plan* plan) {
  const Row& row = step.rows[r];
  int64_t group = step.group(), heads = step.pages.num_kv_heads;
  int64_t most = std::max<int64_t>(1, kMaxVectors / group);
  int64_t least = std::min(most, (kFewVectors + group - 1) / group);
  int64_t of_query = step.cost(step.tile(row, 0, 1, 0, row.query_len)) / row.query_len + 1;
  int64_t size = clamp(target / of_query, least, most);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t q0 = 0; q0 < row.query_len; q0 += size) {
      Tile tile = step.tile(row, h, h + 1, q0, std::min(q0 + size, row.query_len));
      plan->tasks.push_back({r, tile, -1, step.cost(tile)});
    }
}

// Cut the step into tasks, largest first. No result depends on how.
Plan make_plan(const Step& step, int64_t threads) {
  int64_t total = 0, heads = step.pages.num_kv_heads;
  for (const Row& row : step.rows)
    if (row.query_len > 0) total += step.cost(step.tile(row, 0, heads, 0, row.query_len));
  Plan plan;
  // One thread has nothing to share; little work is not worth cutting.
  int64_t target = threads == 1 ? INT64_MAX : std::max(total / (threads * kTasksPerThread), kWorthCutting);
  for (int64_t r = 0; r < (int64_t)step.rows.size(); r++) {
    if (step.rows[r].query_len == 0) continue;
    (r < step.decode_rows ? plan_decode : plan_prefill)(step, r, target, &plan);
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return plan;
}

void attend_all(ffi::ThreadPool& pool, const Step& step) {
  Plan plan = make_plan(step, pool.num_threads());
  Floats partials = plan.partials > 0 ? make_floats(plan.partials) : nullptr;
  int64_t total = 0, vectors = 1, dim = step.pages.head_dim;
  for (const Task& task : plan.tasks) {
    total += task.cost;
    vectors = std::max(vectors, step.vectors(task.tile));
  }
  const PagedAttentionKernels& kernels = paged_attention_kernels_in_use();
  auto run = [&](int64_t i) {
    const Task& task = plan.tasks[i];
    const Row& row = step.rows[task.row];
    float* scratch = thread_scratch(scratch_floats(vectors, dim));
    if (task.split < 0) {
      kernels.attend(step.pages, step.queries, row, task.tile, nullptr, scratch);
      return;
    }
    Split& split = plan.splits[task.split];
    float* all = partials.get() + split.partials;
    Tile before = split.tile;
    before.block1 = task.tile.block0;
    kernels.attend(step.pages, step.queries, row, task.tile, all + step.partial_size(before), scratch);
    if (split.left->fetch_sub(1, std::memory_order_acq_rel) == 1)
      kernels.join(step.pages, step.queries, row, split.tile, all, scratch);
  };
  int64_t count = plan.tasks.size();
  if (total < kWorthSharing) {
    for (int64_t i = 0; i < count; i++) run(i);
  } else {
    parallel_for(pool, count, run);
  }
}

// Padding says zero: every token that no row owns.
void clear_unowned(const Step& step) {
  std::vector<char> owned(step.tokens, 0);
  for (const Row& row : step.rows)
    for (int64_t i = 0; i < row.query_len; i++) owned[row.first_token + i] = 1;
  int64_t size = step.queries.num_heads * step.pages.head_dim;
  for (int64_t t = 0; t < step.tokens; t++)
    if (!owned[t]) std::fill_n(step.queries.out + t * size, size, 0.0f);
}

ffi::Error page_type(ffi::DataType type, PageType* out) {
  switch (type) {
    case ffi::DataType::F32: *out = PageType::kFloat32; return ffi::Error::Success();
    case ffi::DataType::BF16: *out = PageType::kBFloat16; return ffi::Error::Success();
    case ffi::DataType::S8: *out = PageType::kInt8; return ffi::Error::Success();
    default: return bad("paged_attention: pages are float32, bfloat16 or int8");
  }
}

// The pool: key pages, value pages, and of int8 pages both scales.
ffi::Error get_pages(ffi::RemainingArgs arrays, Pages* pages) {
  auto keys = arrays.get<ffi::AnyBuffer>(0), values = arrays.get<ffi::AnyBuffer>(1);
  if (!keys || !values) return bad("paged_attention: needs key and value pages");
  auto shape = keys->dimensions();
  auto other = values->dimensions();
  if (shape.size() != 4 || !std::equal(shape.begin(), shape.end(), other.begin(), other.end()) ||
      keys->element_type() != values->element_type())
    return bad("paged_attention: pages do not fit");
  if (ffi::Error error = page_type(keys->element_type(), &pages->type); error.failure()) return error;
  pages->keys = keys->untyped_data();
  pages->values = values->untyped_data();
  pages->num_pages = shape[0], pages->page_size = shape[1];
  pages->num_kv_heads = shape[2], pages->head_dim = shape[3];
  if (pages->num_pages < 1 || pages->page_size < 1 || pages->num_kv_heads < 1 ||
      pages->head_dim < 1 || pages->head_dim > kMaxHeadDim)
    return bad("paged_attention: pages do not fit");
  pages->key_scales = pages->value_scales = nullptr;
  if (pages->type != PageType::kInt8) {
    return arrays.size() == 2 ? ffi::Error::Success() : bad("paged_attention: unwanted scales");
  }
  int64_t slots = pages->num_pages * pages->page_size * pages->num_kv_heads;
  for (int i = 0; i < 2; i++) {
    auto scales = arrays.get<ffi::AnyBuffer>(2 + i);
    if (!scales || scales->element_type() != ffi::DataType::F32 ||
        (int64_t)scales->element_count() != slots)
      return bad("paged_attention: int8 pages need scales");
    (i == 0 ? pages->key_scales : pages->value_scales) = (float*)scales->untyped_data();
  }
  return ffi::Error::Success();
}

// What is written must be the caller's own memory: the results alias the arguments.
bool aliased(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  for (size_t i = 0; i < rets.size(); i++) {
    auto from = args.get<ffi::AnyBuffer>(i);
    auto to = rets.get<ffi::AnyBuffer>(i);
    if (!from || !to || from->untyped_data() != (*to)->untyped_data()) return false;
  }
  return rets.size() == args.size();
}

std::vector<Row> make_rows(const ffi::Buffer<ffi::S32>& table, const int32_t* starts,
                           const int32_t* query_lens, const int32_t* kv_lens, int64_t page_size,
                           int64_t tokens, int64_t decode_rows, int64_t width, const bool* tree) {
  auto shape = table.dimensions();
  std::vector<Row> rows(shape[0]);
  for (int64_t r = 0; r < shape[0]; r++) {
    Row& row = rows[r];
    bool decode = r < decode_rows;
    row.pages = table.typed_data() + r * shape[1];
    row.kv_len = clamp(kv_lens[r], 0, shape[1] * page_size);
    row.first_token = decode ? r * width : clamp(starts[r], decode_rows * width, tokens);
    int64_t most = std::min(row.kv_len, decode ? width : tokens - row.first_token);
    row.query_len = clamp(query_lens[r], 0, most);
    row.tree = decode && tree != nullptr ? (const uint8_t*)tree + r * width * width : nullptr;
    row.width = width;
  }
  return rows;
}

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                           ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::S32> write_slot,
                           ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> query_starts,
                           ffi::Buffer<ffi::S32> query_lens, ffi::Buffer<ffi::S32> kv_lens,
                           ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::PRED> tree_mask,
                           ffi::RemainingArgs pool_arrays, ffi::ResultBuffer<ffi::F32> out,
                           ffi::RemainingRets new_pool, int64_t decode_rows, int64_t width,
                           float scale, int64_t window, float softcap) {
  Step step;
  if (ffi::Error error = get_pages(pool_arrays, &step.pages); error.failure()) return error;
  auto shape = q.dimensions();
  if (shape.size() != 3 || shape[2] != step.pages.head_dim || shape[1] < 1 ||
      shape[1] % step.pages.num_kv_heads != 0)
    return bad("paged_attention: queries do not fit");
  int64_t T = shape[0], heads = shape[1];
  if (page_table.dimensions().size() != 2) return bad("paged_attention: page table does not fit");
  int64_t R = page_table.dimensions()[0];
  if ((int64_t)query_starts.element_count() != R || (int64_t)query_lens.element_count() != R ||
      (int64_t)kv_lens.element_count() != R || decode_rows < 0 || decode_rows > R || width < 1 ||
      (decode_rows > 0 && width > T / decode_rows) || window < 0)
    return bad("paged_attention: rows do not fit");
  int64_t num_sinks = sinks.element_count(), tree_size = tree_mask.element_count();
  if ((num_sinks != 0 && num_sinks != heads) ||
      (tree_size != 0 && tree_size != decode_rows * width * width))
    return bad("paged_attention: sinks or tree mask do not fit");
  step.tokens = T, step.decode_rows = decode_rows;
  step.queries = Queries{q.typed_data(), out->typed_data(), heads, scale, window, softcap,
                         num_sinks != 0 ? sinks.typed_data() : nullptr};
  step.rows = make_rows(page_table, query_starts.typed_data(), query_lens.typed_data(),
                        kv_lens.typed_data(), step.pages.page_size, T, decode_rows, width,
                        tree_size != 0 ? tree_mask.typed_data() : nullptr);
  if (new_pool.size() != 0) {
    int64_t size = step.pages.num_kv_heads * step.pages.head_dim;
    if (!aliased(pool_arrays, new_pool)) return bad("paged_attention: the pool was not aliased");
    if ((int64_t)k.element_count() != T * size || (int64_t)v.element_count() != T * size ||
        (int64_t)write_slot.element_count() != T)
      return bad("paged_attention: new keys and values do not fit");
    auto write = paged_attention_kernels_in_use().write;
    int64_t pieces = std::min(T, T * size * 4 / kWorthSharing + 1);
    parallel_for(pool, pieces, [&](int64_t i) {
      write(step.pages, k.typed_data(), v.typed_data(), write_slot.typed_data(), i * T / pieces,
            (i + 1) * T / pieces);
    });
  }
  clear_unowned(step);
  attend_all(pool, step);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .RemainingRets()
                                  .Attr<int64_t>("decode_rows")
                                  .Attr<int64_t>("width")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap"));

}  // namespace jaxserve
