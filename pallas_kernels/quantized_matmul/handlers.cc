// XLA FFI handlers of the packed product. Shapes were checked in Python (cpu.py); what would read
// outside a buffer is checked again here, because a handler can be reached without Python.
#include <algorithm>

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

ffi::Error matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> panels,
                  ffi::ResultBuffer<ffi::F32> y, int64_t format, int64_t group, int64_t n,
                  int64_t k) {
  Matrix w;
  if (!make_matrix(panels, format, group, n, k, &w)) return bad("matmul: panels do not fit");
  auto shape = x.dimensions();
  if (shape.size() != 2 || shape[1] != k) return bad("matmul: activations do not fit");
  int64_t m = shape[0], num_panels = (n + kPanel - 1) / kPanel;
  if (m == 0) return ffi::Error::Success();
  int64_t slices = (m + kMostRows - 1) / kMostRows;
  // Neighbouring panels go to one thread, whose reads then run on from one into the next.
  int64_t runs = std::min(num_panels, pool.num_threads() * kRunsPerThread);
  const float* in = x.typed_data();
  float* out = y->typed_data();
  auto kernel = matmul_kernels_in_use().panel;
  auto task = [&](int64_t i) {
    int64_t run = i / slices, slice = i % slices;
    for (int64_t p = run * num_panels / runs; p < (run + 1) * num_panels / runs; p++)
      kernel(w, p, in, out, slice * m / slices, (slice + 1) * m / slices);
  };
  if (m * n * k < kWorthSharing) {
    for (int64_t i = 0; i < runs * slices; i++) task(i);
  } else {
    parallel_for(pool, runs * slices, task);
  }
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_matmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("k"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_take_rows, take_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("k"));

}  // namespace jaxserve
