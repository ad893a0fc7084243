// The kernels of the packed product, as plain functions: what the handlers call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../native/isa.h"

namespace jaxserve {

constexpr int kPanel = 32;       // output rows that lie side by side in a panel
constexpr int kReduction = 256;  // inputs summed in one chain before the chain's sum is added
constexpr int kMostRows = 96;    // in one call: expanding again costs about 1 % of multiplying 96

struct Matrix {
  const uint8_t* panels;
  int64_t panel_bytes;
  int64_t n, k;
  int64_t group;  // inputs per scale of the grouped formats
  int format;     // native_id of formats.py
};

// A product is made panel by panel into sums [rows][kPanel], a few KiB in the cache, and from there
// into its result, once: rows of a result lie a power of two apart often enough, and would throw each
// other out of the cache.
struct MatmulKernels {
  // sums = x [rows, k] . w of the 32 outputs of one panel; rows <= kMostRows. sums: 64-byte aligned.
  void (*panel)(const Matrix& w, int64_t panel, const float* x, int64_t rows, float* sums);
  // y [rows, ...] = sums [rows][width], plus addend, which lies as y does, if it is not null.
  void (*put)(const float* sums, int64_t rows, int64_t width, const float* addend, float* y,
              int64_t stride);
  // out [k]: row `row` of the matrix, expanded.
  void (*take_row)(const Matrix& w, int64_t row, float* out);
};

}  // namespace jaxserve

JS_KERNEL_TABLE(MatmulKernels, matmul_kernels)
