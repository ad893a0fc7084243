// XLA FFI handlers of the packed product. Shapes were checked in Python (cpu.py); what would read
// outside a buffer is checked again here, because a handler can be reached without Python.
#include <algorithm>
#include <utility>

#include "../gated_activation/cpu.h"
#include "../native/parallel.h"
#include "cpu.h"
#include "pack.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

ffi::Error bad(const char* what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, what); }

bool make_matrix(const ffi::Buffer<ffi::U8>& panels, int64_t format, int64_t group, int64_t n,
                 int64_t k, Matrix* w) {
  if (n < 1 || k < 1 || group < 0 || format < 0 || format > 1000) return false;
  if (format >= 10 && format <= 12 && (group < 1 || k % group)) return false;
  int64_t bytes = panel_bytes((int)format, k, group);
  auto shape = panels.dimensions();
  if (bytes < 1 || shape.size() != 2 || shape[0] != (n + kPanel - 1) / kPanel || shape[1] != bytes)
    return false;
  *w = Matrix{panels.typed_data(), bytes, n, k, group, (int)format};
  return true;
}

// Multiply-adds below which waking another thread costs more than it saves.
constexpr int64_t kWorthSharing = 1 << 16;
constexpr int64_t kRunsPerThread = 6;  // enough that a thread that comes late takes fewer

// Calls body(panel, first row, rows) for all of m rows and `panels` panels; work: multiply-adds.
template <class Body>
void for_panels(ffi::ThreadPool& pool, int64_t m, int64_t panels, int64_t work, const Body& body) {
  int64_t slices = (m + kMostRows - 1) / kMostRows;
  // Neighbouring panels go to one thread, whose reads then run on from one into the next.
  int64_t runs = std::min(panels, pool.num_threads() * kRunsPerThread);
  auto task = [&](int64_t i) {
    int64_t run = i / slices, slice = i % slices, m0 = slice * m / slices;
    for (int64_t p = run * panels / runs; p < (run + 1) * panels / runs; p++)
      body(p, m0, (slice + 1) * m / slices - m0);
  };
  if (work < kWorthSharing) {
    for (int64_t i = 0; i < runs * slices; i++) task(i);
  } else {
    parallel_for(pool, runs * slices, task);
  }
}

// y [m, n] = x [m, k] . w [n, k], plus addend [m, n] if it is not null.
ffi::Error product(ffi::ThreadPool& pool, ffi::Buffer<ffi::F32>& x, ffi::Buffer<ffi::U8>& panels,
                   const float* addend, ffi::ResultBuffer<ffi::F32>& y, int64_t format,
                   int64_t group, int64_t n, int64_t k) {
  Matrix w;
  if (!make_matrix(panels, format, group, n, k, &w)) return bad("matmul: panels do not fit");
  auto shape = x.dimensions();
  if (shape.size() != 2 || shape[1] != k || (int64_t)y->element_count() != shape[0] * n)
    return bad("matmul: activations do not fit");
  int64_t m = shape[0];
  if (m == 0) return ffi::Error::Success();
  const float* in = x.typed_data();
  float* out = y->typed_data();
  const MatmulKernels& kernels = matmul_kernels_in_use();
  for_panels(pool, m, (n + kPanel - 1) / kPanel, m * n * k, [&](int64_t p, int64_t m0, int64_t rows) {
    alignas(64) float sums[kMostRows * kPanel];
    int64_t at = m0 * n + p * kPanel;
    kernels.panel(w, p, in + m0 * k, rows, sums);
    kernels.put(sums, rows, std::min<int64_t>(kPanel, n - p * kPanel),
                addend == nullptr ? nullptr : addend + at, out + at, n);
  });
  return ffi::Error::Success();
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> panels,
                  ffi::ResultBuffer<ffi::F32> y, int64_t format, int64_t group, int64_t n,
                  int64_t k) {
  return product(pool, x, panels, nullptr, y, format, group, n, k);
}

ffi::Error matmul_add(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> panels,
                      ffi::Buffer<ffi::F32> addend, ffi::ResultBuffer<ffi::F32> y, int64_t format,
                      int64_t group, int64_t n, int64_t k) {
  if (addend.element_count() != y->element_count()) return bad("matmul_add: addend does not fit");
  return product(pool, x, panels, addend.typed_data(), y, format, group, n, k);
}

// y [m, n / 2] = f(x . gate) (x . up), gate being the first half of w's rows, a whole number of
// panels, and up the other.
ffi::Error gated_matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> panels,
                        ffi::ResultBuffer<ffi::F32> y, int64_t format, int64_t group, int64_t n,
                        int64_t k, int64_t function) {
  Matrix w;
  if (!make_matrix(panels, format, group, n, k, &w) || n % (2 * kPanel))
    return bad("gated_matmul: panels do not fit");
  auto shape = x.dimensions();
  int64_t size = n / 2;
  if (shape.size() != 2 || shape[1] != k || (int64_t)y->element_count() != shape[0] * size)
    return bad("gated_matmul: activations do not fit");
  if (function != kSilu && function != kGeluTanh) return bad("gated_matmul: unknown function");
  int64_t m = shape[0], pairs = size / kPanel;
  if (m == 0) return ffi::Error::Success();
  const float* in = x.typed_data();
  float* out = y->typed_data();
  auto panel = matmul_kernels_in_use().panel;
  auto gate_row = gated_activation_kernels_in_use().row;
  for_panels(pool, m, pairs, m * n * k, [&](int64_t p, int64_t m0, int64_t rows) {
    alignas(64) float gate[kMostRows * kPanel], up[kMostRows * kPanel];
    panel(w, p, in + m0 * k, rows, gate);
    panel(w, pairs + p, in + m0 * k, rows, up);
    for (int64_t r = 0; r < rows; r++)
      gate_row((int)function, gate + r * kPanel, up + r * kPanel, out + (m0 + r) * size + p * kPanel,
               kPanel);
  });
  return ffi::Error::Success();
}

ffi::Error take_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::U8> panels,
                     ffi::ResultBuffer<ffi::F32> out, int64_t format, int64_t group, int64_t n,
                     int64_t k) {
  Matrix w;
  if (!make_matrix(panels, format, group, n, k, &w)) return bad("take_rows: panels do not fit");
  auto kernel = matmul_kernels_in_use().take_row;
  const int32_t* rows = ids.typed_data();
  float* to = out->typed_data();
  parallel_for(pool, (int64_t)ids.element_count(), [&](int64_t i) {
    int64_t row = rows[i] < 0 ? 0 : rows[i] >= n ? n - 1 : rows[i];
    kernel(w, row, to + i * k);
  });
  return ffi::Error::Success();
}

// What every call says about its matrix, after its buffers.
template <class Binding>
auto with_matrix(Binding buffers) {
  return std::move(buffers)
      .template Attr<int64_t>("format")
      .template Attr<int64_t>("group")
      .template Attr<int64_t>("n")
      .template Attr<int64_t>("k");
}

auto bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_matmul, matmul,
                              with_matrix(bind()
                                              .Arg<ffi::Buffer<ffi::F32>>()
                                              .Arg<ffi::Buffer<ffi::U8>>()
                                              .Ret<ffi::Buffer<ffi::F32>>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_matmul_add, matmul_add,
                              with_matrix(bind()
                                              .Arg<ffi::Buffer<ffi::F32>>()
                                              .Arg<ffi::Buffer<ffi::U8>>()
                                              .Arg<ffi::Buffer<ffi::F32>>()
                                              .Ret<ffi::Buffer<ffi::F32>>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_gated_matmul, gated_matmul,
                              with_matrix(bind()
                                              .Arg<ffi::Buffer<ffi::F32>>()
                                              .Arg<ffi::Buffer<ffi::U8>>()
                                              .Ret<ffi::Buffer<ffi::F32>>())
                                  .Attr<int64_t>("function"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_take_rows, take_rows,
                              with_matrix(bind()
                                              .Arg<ffi::Buffer<ffi::S32>>()
                                              .Arg<ffi::Buffer<ffi::U8>>()
                                              .Ret<ffi::Buffer<ffi::F32>>()));

}  // namespace jaxserve
