// Which instruction set this process runs: chosen once, the best the machine has, or the one that
// JAXSERVE_CPU_ISA names (for tests, and to compare).
#pragma once

namespace jaxserve {

enum class Isa { kBaseline, kAvx2, kAvx512 };

bool machine_has(Isa isa);

Isa isa_in_use();
const char* isa_name();  // "baseline" (SSE2 or NEON, by the machine), "avx2", "avx512"

// Null, or why JAXSERVE_CPU_ISA cannot be had here.
const char* isa_problem();

}  // namespace jaxserve

// Declares the copies of an op's table of kernels, one per instruction set, and a function
// `name_in_use()` that returns the right one.
#if defined(__x86_64__)
#define JS_KERNEL_TABLE(Type, name)                         \
  namespace jaxserve {                                      \
  namespace baseline { extern const Type name; }            \
  namespace avx2 { extern const Type name; }                \
  namespace avx512 { extern const Type name; }              \
  inline const Type& name##_in_use() {                      \
    switch (isa_in_use()) {                                 \
      case Isa::kAvx512: return avx512::name;               \
      case Isa::kAvx2: return avx2::name;                   \
      default: return baseline::name;                       \
    }                                                       \
  }                                                         \
  }
#else
#define JS_KERNEL_TABLE(Type, name)                         \
  namespace jaxserve {                                      \
  namespace baseline { extern const Type name; }            \
  inline const Type& name##_in_use() { return baseline::name; } \
  }
#endif
