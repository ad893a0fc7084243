#include "../native/parallel.h"
#include "cpu.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kElementsPerTask = 1 << 14;  // about 10 us of work

// x [T, H, D], cosines and sines [T, D / 2] -> [T, H, D].
ffi::Error rope(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cosines,
                ffi::Buffer<ffi::F32> sines, ffi::ResultBuffer<ffi::F32> out) {
  auto shape = x.dimensions();
  auto angles = cosines.dimensions(), angles2 = sines.dimensions();
  if (shape.size() != 3 || shape[2] % 2 || angles.size() != 2 || angles2.size() != 2 ||
      angles[0] != shape[0] || angles2[0] != shape[0] || angles[1] != shape[2] / 2 ||
      angles2[1] != shape[2] / 2)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "rope: shapes do not fit");
  int64_t tokens = shape[0], heads = shape[1], size = shape[2], half = size / 2;
  if (tokens * heads * half == 0) return ffi::Error::Success();
  int64_t tasks = (tokens * heads * size + kElementsPerTask - 1) / kElementsPerTask;
  if (tasks > tokens) tasks = tokens;
  const float* from = x.typed_data();
  const float* c = cosines.typed_data();
  const float* s = sines.typed_data();
  float* to = out->typed_data();
  auto kernel = rope_kernels_in_use().head;
  parallel_for(pool, tasks, [&](int64_t i) {
    for (int64_t t = i * tokens / tasks; t < (i + 1) * tokens / tasks; t++)
      for (int64_t h = t * heads; h < (t + 1) * heads; h++)
        kernel(from + h * size, c + t * half, s + t * half, to + h * size, half);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rope, rope,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace jaxserve
