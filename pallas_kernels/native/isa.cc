#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jaxserve {

bool machine_has(Isa isa) {
  if (isa == Isa::kBaseline) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;  // "f16c" is a name that only some compilers' builtin knows
  bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  if (isa == Isa::kAvx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

namespace {

struct Choice {
  Isa isa = Isa::kBaseline;
  const char* problem = nullptr;
};

Choice choose() {
  const char* wanted = std::getenv("JAXSERVE_CPU_ISA");
  if (wanted == nullptr || *wanted == 0) {
    for (Isa isa : {Isa::kAvx512, Isa::kAvx2})
      if (machine_has(isa)) return {isa, nullptr};
    return {};
  }
  Isa isa;
  if (std::strcmp(wanted, "baseline") == 0) {
    isa = Isa::kBaseline;
  } else if (std::strcmp(wanted, "avx2") == 0) {
    isa = Isa::kAvx2;
  } else if (std::strcmp(wanted, "avx512") == 0) {
    isa = Isa::kAvx512;
  } else {
    return {Isa::kBaseline,
            "JAXSERVE_CPU_ISA names no instruction set; choose baseline, avx2 or avx512"};
  }
  if (!machine_has(isa)) {
    return {Isa::kBaseline, "JAXSERVE_CPU_ISA names an instruction set this machine lacks"};
  }
  return {isa, nullptr};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

Isa isa_in_use() { return chosen().isa; }

const char* isa_problem() { return chosen().problem; }

const char* isa_name() {
  switch (isa_in_use()) {
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    default: return "baseline";
  }
}

}  // namespace jaxserve
