#include "../native/parallel.h"
#include "cpu.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kElementsPerTask = 1 << 14;  // about 10 us of work

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                    ffi::ResultBuffer<ffi::F32> out, float eps) {
  auto shape = x.dimensions();
  if (shape.size() != 2 || (int64_t)weight.element_count() != shape[1])
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "rms_norm: shapes do not fit");
  int64_t rows = shape[0], size = shape[1];
  if (rows == 0 || size == 0) return ffi::Error::Success();
  int64_t tasks = (rows * size + kElementsPerTask - 1) / kElementsPerTask;
  if (tasks > rows) tasks = rows;
  const float* from = x.typed_data();
  const float* scale = weight.typed_data();
  float* to = out->typed_data();
  auto kernel = rms_norm_kernels_in_use().row;
  parallel_for(pool, tasks, [&](int64_t i) {
    for (int64_t r = i * rows / tasks; r < (i + 1) * rows / tasks; r++)
      kernel(from + r * size, scale, eps, to + r * size, size);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps"));

}  // namespace jaxserve
