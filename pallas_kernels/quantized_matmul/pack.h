// From matrices as checkpoints keep them ("rows") to panels, losing nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxserve {

// A matrix in the layout "rows" (see array.py). Which pointers are set depends on the format.
struct Rows {
  int format;
  int64_t n, k, group;
  const uint8_t* codes;   // dense values, grouped codes, or blocks: [n, row_bytes]
  int64_t row_bytes;
  const float* scales;    // grouped: [n, k / group]
  const uint8_t* zeros;   // grouped: [n, k / group] or null
};

// Bytes of one panel of 32 output rows; -1 for an unknown format, inputs that are not whole blocks
// or groups, and groups of 4-bit codes that are not whole words.
int64_t panel_bytes(int format, int64_t k, int64_t group);

// Write panels [first, last) to out, which starts at panel `first`.
void pack_panels(const Rows& rows, int64_t first, int64_t last, uint8_t* out);

}  // namespace jaxserve
