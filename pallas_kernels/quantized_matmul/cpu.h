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

struct MatmulKernels {
  // y[m, n] = x[m, :] . w[n, :] for rows [m0, m1), at most kMostRows, and the 32 outputs of one
  // panel.
  void (*panel)(const Matrix& w, int64_t panel, const float* x, float* y, int64_t m0, int64_t m1);
  // out [k]: row `row` of the matrix, expanded.
  void (*take_row)(const Matrix& w, int64_t row, float* out);
};

}  // namespace jaxserve

JS_KERNEL_TABLE(MatmulKernels, matmul_kernels)
