#include "../native/parallel.h"
#include "cpu.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

// x [R, N] -> [R].
ffi::Error row_sum(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> out) {
  auto shape = x.dimensions();
  if (shape.size() != 2)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "row_sum: wants a matrix");
  const float* from = x.typed_data();
  float* to = out->typed_data();
  int64_t size = shape[1];
  auto kernel = row_sum_kernels_in_use().row;
  parallel_for(pool, shape[0], [&](int64_t r) { to[r] = kernel(from + r * size, size); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_row_sum, row_sum,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace jaxserve
