// What the checks of the native kernels share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "../../pallas_kernels/paged_attention/cpu.h"

namespace jaxserve {

// Counts and prints a failure unless `good`. copy: of the kernels; where: which case.
void check(bool good, const char* copy, const std::string& where, const char* what);

// An array on the heap with nothing after it; a vector may keep more room than it has elements.
template <class T>
struct Exact {
  explicit Exact(int64_t size) : size(size), data(new T[(size_t)size]) {}
  int64_t size;
  std::unique_ptr<T[]> data;
  T* get() { return data.get(); }
  T& operator[](int64_t i) { return data[(size_t)i]; }
};

Exact<float> random_floats(int64_t size);  // -1 to 1, the same on every machine

// In attention.cc.
void check_attention(const PagedAttentionKernels& kernels, const char* copy);

}  // namespace jaxserve
