// Calls every copy of the native kernels without Python and without XLA, on buffers of exactly the
// right size, so that a sanitizer sees any access outside them (XLA's own buffers are padded).
//
// Usage: driver CASES [COPY...]   CASES: a file of write_cases.py, packed matrices and what they
// stand for; COPY: baseline, avx2, avx512, lanes16, by default all that this machine can run.
// lanes16 is the code of the 16-lane copy compiled for AVX2: its logic where there is no AVX-512.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "driver.h"
#include "../../pallas_kernels/gated_activation/cpu.h"
#include "../../pallas_kernels/quantized_matmul/cpu.h"
#include "../../pallas_kernels/quantized_matmul/pack.h"
#include "../../pallas_kernels/rms_norm/cpu.h"
#include "../../pallas_kernels/rope/cpu.h"
#include "../../pallas_kernels/row_sum/cpu.h"

namespace jaxserve {

#if defined(__x86_64__)
namespace lanes16 {
extern const MatmulKernels matmul_kernels;
extern const RmsNormKernels rms_norm_kernels;
extern const GatedActivationKernels gated_activation_kernels;
extern const RopeKernels rope_kernels;
extern const RowSumKernels row_sum_kernels;
extern const PagedAttentionKernels paged_attention_kernels;
}  // namespace lanes16
#endif

namespace {

struct Copy {
  const char* name;
  bool runs_here;
  const MatmulKernels& matmul;
  const RmsNormKernels& rms_norm;
  const GatedActivationKernels& gate;
  const RopeKernels& rope;
  const RowSumKernels& row_sum;
  const PagedAttentionKernels& attention;
};

#define COPY(name, runs_here)                                                    \
  Copy {                                                                         \
    #name, runs_here, name::matmul_kernels, name::rms_norm_kernels,              \
        name::gated_activation_kernels, name::rope_kernels, name::row_sum_kernels, \
        name::paged_attention_kernels                                            \
  }

std::vector<Copy> copies() {
  std::vector<Copy> all = {COPY(baseline, true)};
#if defined(__x86_64__)
  bool avx2 = machine_has(Isa::kAvx2);
  all.push_back(COPY(avx2, avx2));
  all.push_back(COPY(lanes16, avx2));
  all.push_back(COPY(avx512, machine_has(Isa::kAvx512)));
#endif
  return all;
}

int failures = 0;

}  // namespace

void check(bool good, const char* copy, const std::string& where, const char* what) {
  if (good) return;
  if (++failures <= 20) std::printf("FAILED %s %s: %s\n", copy, where.c_str(), what);
}

Exact<float> random_floats(int64_t size) {
  static uint32_t state = 1;
  Exact<float> x(size);
  for (int64_t i = 0; i < size; i++) {
    state = state * 1664525u + 1013904223u;
    x[i] = (float)(int32_t)state * 0x1p-31f;
  }
  return x;
}

namespace {

// ---- packed matrices ----

struct File {
  std::FILE* file;

  template <class T>
  void read(T* into, int64_t count) {
    if (std::fread(into, sizeof(T), (size_t)count, file) != (size_t)count) {
      std::fprintf(stderr, "the cases file ends too early; write it again\n");
      std::exit(2);
    }
  }

  int64_t number() {
    int64_t value;
    read(&value, 1);
    return value;
  }
};

struct Case {
  std::string name;
  int64_t format, n, k, group, row_bytes, num_scales, num_zeros;
  Exact<uint8_t> codes, zeros;
  Exact<float> scales;
  Exact<double> want;  // [n, k]

  static Case read(File& file) {
    std::string name((size_t)file.number(), ' ');
    file.read(&name[0], (int64_t)name.size());
    int64_t numbers[7];
    file.read(numbers, 7);
    Case c{name, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6],
           Exact<uint8_t>(numbers[1] * numbers[4]), Exact<uint8_t>(numbers[6]),
           Exact<float>(numbers[5]), Exact<double>(numbers[1] * numbers[2])};
    file.read(c.codes.get(), c.codes.size);
    file.read(c.scales.get(), c.scales.size);
    file.read(c.zeros.get(), c.zeros.size);
    file.read(c.want.get(), c.want.size);
    return c;
  }
};

Exact<uint8_t> pack(Case& c) {
  Rows rows{(int)c.format, c.n, c.k, c.group, c.codes.get(), c.row_bytes,
            c.num_scales ? c.scales.get() : nullptr, c.num_zeros ? c.zeros.get() : nullptr};
  int64_t count = (c.n + kPanel - 1) / kPanel, bytes = panel_bytes((int)c.format, c.k, c.group);
  Exact<uint8_t> all(count * bytes);
  pack_panels(rows, 0, count, all.get());
  for (int64_t p = 0; p < count; p++) {
    Exact<uint8_t> one(bytes);
    pack_panels(rows, p, p + 1, one.get());
    check(std::memcmp(one.get(), all.get() + p * bytes, (size_t)bytes) == 0, "pack", c.name,
          "a panel packed alone differs");
  }
  return all;
}

void check_rows(const Copy& copy, Case& c, const Matrix& w, Exact<float>& taken) {
  double largest = 0;
  for (int64_t i = 0; i < c.want.size; i++) largest = std::fmax(largest, std::fabs(c.want[i]));
  for (int64_t n = 0; n < c.n; n++) {
    Exact<float> out(c.k);
    copy.matmul.take_row(w, n, out.get());
    for (int64_t k = 0; k < c.k; k++) {
      double want = c.want[n * c.k + k], bound = 3e-7 * std::fabs(want) + 1e-7 * largest;
      if (c.format < 10) bound = 0;
      check(std::fabs(out[k] - want) <= bound, copy.name, c.name, "a row comes out wrong");
      taken[n * c.k + k] = out[k];
    }
  }
}

// Rows [m0, m1) of x times w, plus addend if it is not null; the other rows of the result are NaN.
Exact<float> product(const Copy& copy, const Matrix& w, const float* x, int64_t rows, int64_t m0,
                     int64_t m1, const float* addend = nullptr) {
  Exact<float> exact_x((m1 - m0) * w.k), y(rows * w.n), sums((m1 - m0) * kPanel);
  std::memcpy(exact_x.get(), x + m0 * w.k, (size_t)exact_x.size * sizeof(float));
  for (int64_t i = 0; i < y.size; i++) y[i] = NAN;
  for (int64_t p = 0; p < (w.n + kPanel - 1) / kPanel; p++) {
    int64_t width = w.n - p * kPanel < kPanel ? w.n - p * kPanel : kPanel;
    int64_t at = m0 * w.n + p * kPanel;
    copy.matmul.panel(w, p, exact_x.get(), m1 - m0, sums.get());
    copy.matmul.put(sums.get(), m1 - m0, width, addend == nullptr ? nullptr : addend + at,
                    y.get() + at, w.n);
  }
  return y;
}

void check_products(const Copy& copy, Case& c, const Matrix& w, double* worst) {
  constexpr int64_t kMost = 17;
  Exact<float> x = random_floats(kMost * c.k);
  Exact<float> full = product(copy, w, x.get(), kMost, 0, kMost);
  for (int64_t m = 0; m < kMost; m++) {
    for (int64_t n = 0; n < c.n; n++) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < c.k; k++) {
        double term = (double)x[m * c.k + k] * c.want[n * c.k + k];
        sum += term, size += std::fabs(term);
      }
      double error = std::fabs(full[m * c.n + n] - sum);
      check(error <= 1e-6 * size, copy.name, c.name, "a product is wrong");
      if (size > 0) *worst = std::fmax(*worst, error / size);
    }
  }
  // Each row has the same bits alone, among others, and at another place.
  for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 13}) {
    for (int64_t first : {(int64_t)0, kMost - rows}) {
      Exact<float> some = product(copy, w, x.get() + first * c.k, rows, 0, rows);
      check(std::memcmp(some.get(), full.get() + first * c.n, (size_t)some.size * 4) == 0, copy.name,
            c.name, "rows depend on their neighbours");
    }
  }
  Exact<float> part = product(copy, w, x.get(), kMost, 3, 9);
  for (int64_t i = 0; i < part.size; i++) {
    bool inside = i >= 3 * c.n && i < 9 * c.n;
    check(inside ? part[i] == full[i] : std::isnan(part[i]), copy.name, c.name,
          "rows outside [m0, m1) were written, or those inside are wrong");
  }
  Exact<float> addend = random_floats(full.size);
  Exact<float> sum = product(copy, w, x.get(), kMost, 0, kMost, addend.get());
  for (int64_t i = 0; i < sum.size; i++)
    check(sum[i] == addend[i] + full[i], copy.name, c.name, "an addend is not just added");
}

// ---- the small ops ----

const int64_t kSizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 576};

void check_rms_norm(const Copy& copy) {
  for (int64_t size : kSizes) {
    Exact<float> x = random_floats(size), weight = random_floats(size), out(size);
    copy.rms_norm.row(x.get(), weight.get(), 1e-5f, out.get(), size);
    double squares = 0;
    for (int64_t i = 0; i < size; i++) squares += (double)x[i] * x[i];
    for (int64_t i = 0; i < size; i++) {
      double want = x[i] / std::sqrt(squares / (double)size + 1e-5) * weight[i];
      check(std::fabs(out[i] - want) <= 1e-6 * std::fabs(want), copy.name, std::to_string(size),
            "rms_norm is wrong");
    }
  }
}

double activation(int function, double x) {
  if (function == kSilu) return x / (1 + std::exp(-x));
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void check_gate(const Copy& copy) {
  for (int function : {kSilu, kGeluTanh}) {
    for (int64_t size : kSizes) {
      Exact<float> gate = random_floats(size), up = random_floats(size), out(size);
      for (int64_t i = 0; i < size; i++) gate[i] *= 12;
      copy.gate.row(function, gate.get(), up.get(), out.get(), size);
      for (int64_t i = 0; i < size; i++) {
        double want = activation(function, gate[i]) * up[i];
        check(std::fabs(out[i] - want) <= 2e-6 * std::fabs(want) + 1e-6, copy.name,
              std::to_string(size), "gated_activation is wrong");
      }
    }
  }
}

void check_rope_and_sum(const Copy& copy) {
  for (int64_t half : kSizes) {
    Exact<float> x = random_floats(2 * half), c = random_floats(half), s = random_floats(half);
    Exact<float> out(2 * half);
    copy.rope.head(x.get(), c.get(), s.get(), out.get(), half);
    double total = 0;
    for (int64_t i = 0; i < 2 * half; i++) {
      int64_t pair = i % half;
      double other = i < half ? -(double)x[i + half] : (double)x[i - half];
      double want = (double)x[i] * c[pair] + other * s[pair];
      check(std::fabs(out[i] - want) <= 3e-7, copy.name, std::to_string(half), "rope is wrong");
      total += x[i];
    }
    float sum = copy.row_sum.row(x.get(), 2 * half);
    check(std::fabs(sum - total) <= 1e-6 * (double)half, copy.name, std::to_string(half),
          "row_sum is wrong");
  }
}

void check_copy(const Copy& copy, std::vector<Case>& cases) {
  double worst = 0;
  for (Case& c : cases) {
    Exact<uint8_t> panels = pack(c);
    Matrix w{panels.get(), panel_bytes((int)c.format, c.k, c.group), c.n, c.k, c.group,
             (int)c.format};
    Exact<float> taken(c.n * c.k);
    check_rows(copy, c, w, taken);
    check_products(copy, c, w, &worst);
  }
  check_rms_norm(copy);
  check_gate(copy);
  check_rope_and_sum(copy);
  check_attention(copy.attention, copy.name);
  std::printf("%s: %zu matrices, largest error of a product %.1e of the sum of its terms' sizes\n",
              copy.name, cases.size(), worst);
}

int run(int argc, char** argv) {
  File file{argc < 2 ? nullptr : std::fopen(argv[1], "rb")};
  if (file.file == nullptr) {
    std::fprintf(stderr, "usage: driver CASES [COPY...]; CASES as written by write_cases.py\n");
    return 2;
  }
  std::vector<Case> cases;
  for (int64_t left = file.number(); left > 0; left--) cases.push_back(Case::read(file));
  std::fclose(file.file);
  for (const Copy& copy : copies()) {
    bool wanted = argc == 2;
    for (int i = 2; i < argc; i++) wanted |= std::strcmp(argv[i], copy.name) == 0;
    if (wanted && copy.runs_here) check_copy(copy, cases);
    if (wanted && !copy.runs_here) std::printf("%s: this machine cannot run it\n", copy.name);
  }
  if (failures != 0) std::printf("%d checks FAILED\n", failures);
  return failures != 0;
}

}  // namespace
}  // namespace jaxserve

int main(int argc, char** argv) { return jaxserve::run(argc, argv); }
