#include "../native/parallel.h"
#include "cpu.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kElementsPerTask = 1 << 13;  // about 10 us of work

// gate_up [T, 2 F], gate first -> [T, F].
ffi::Error gated_activation(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> gate_up,
                            ffi::ResultBuffer<ffi::F32> out, int64_t function) {
  auto shape = gate_up.dimensions();
  if (shape.size() != 2 || shape[1] % 2 || (function != kSilu && function != kGeluTanh))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "gated_activation: arguments do not fit");
  int64_t rows = shape[0], size = shape[1] / 2;
  if (rows == 0 || size == 0) return ffi::Error::Success();
  int64_t tasks = (rows * size + kElementsPerTask - 1) / kElementsPerTask;
  if (tasks > rows) tasks = rows;
  const float* from = gate_up.typed_data();
  float* to = out->typed_data();
  auto kernel = gated_activation_kernels_in_use().row;
  parallel_for(pool, tasks, [&](int64_t i) {
    for (int64_t r = i * rows / tasks; r < (i + 1) * rows / tasks; r++) {
      const float* gate = from + 2 * r * size;
      kernel((int)function, gate, gate + size, to + r * size, size);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_gated_activation, gated_activation,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("function"));

}  // namespace jaxserve
