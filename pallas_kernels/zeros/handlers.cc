// Zeros that nobody wrote: the system gives zeroed pages when they are first touched, so a large
// pool costs neither time nor memory until it is used, and then comes in huge pages, which native
// kernels read faster.
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr uintptr_t kHugePage = 2 << 20;

// Makes whole huge pages inside [begin, end) fresh; returns their bounds, empty if it could not.
bool drop_pages(uintptr_t begin, uintptr_t end, uintptr_t* first, uintptr_t* last) {
  *first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  *last = end & ~(kHugePage - 1);
#if defined(__linux__)
  if (*first >= *last) return false;
  void* start = reinterpret_cast<void*>(*first);
  madvise(start, *last - *first, MADV_HUGEPAGE);  // a wish: without them small pages serve
  // XLA's buffers are private anonymous memory, whose dropped pages come back zeroed.
  return madvise(start, *last - *first, MADV_DONTNEED) == 0;
#else
  return false;
#endif
}

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  char* data = static_cast<char*>(out->untyped_data());
  uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + out->size_bytes();
  uintptr_t first, last;
  if (drop_pages(begin, end, &first, &last)) {
    std::memset(data, 0, first - begin);
    std::memset(reinterpret_cast<void*>(last), 0, end - last);
  } else {
    std::memset(data, 0, end - begin);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_zeros, zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

}  // namespace jaxserve
