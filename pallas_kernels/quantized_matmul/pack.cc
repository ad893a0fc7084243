// The layouts are those that cpu.cc reads; both name their parts in the same order.
#include "pack.h"

#include <cstring>

#include "cpu.h"

namespace jaxserve {
namespace {

constexpr int64_t kPlane4 = 16 * 8;  // bytes of 8 inputs of 4-bit codes

int nibble_shift(int i) { return 4 * (2 * (i % 4) + i / 4); }

void add_word(uint8_t* words, int lane, uint32_t bits) {
  uint32_t word;
  std::memcpy(&word, words + 4 * lane, 4);
  word |= bits;
  std::memcpy(words + 4 * lane, &word, 4);
}

// Codes of one output row to its lane: 4 low bits to the nibble planes.
void put_nibbles(uint8_t* planes, int lane, const uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    add_word(planes + i / 8 * kPlane4, lane, (uint32_t)(codes[i] & 15) << nibble_shift(i % 8));
}

// The bits above the nibbles, `bits` of them, for up to 32 / bits inputs.
void put_high_bits(uint8_t* words, int lane, const uint8_t* codes, int count, int bits) {
  for (int i = 0; i < count; i++)
    add_word(words, lane, (uint32_t)(codes[i] >> 4) << (8 * (i % 4) + bits * (i / 4)));
}

void put_bytes(uint8_t* plane, int lane, const uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i++) plane[i * kPanel + lane] = codes[i];
}

void put_half(uint8_t* plane, int lane, const uint8_t* value) {
  std::memcpy(plane + 2 * lane, value, 2);
}

// ---- GGUF blocks: the layouts of ggml's block_q4_0 ... block_q6_K and block_mxfp4 ----

// 32 codes from 16 bytes (low nibbles are the first 16) and perhaps 32 bits of fifth bits.
void unpack_legacy(const uint8_t* nibbles, const uint8_t* fifth, uint8_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = nibbles[i] & 15;
    codes[i + 16] = nibbles[i] >> 4;
  }
  if (fifth == nullptr) return;
  for (int i = 0; i < 32; i++) codes[i] |= (fifth[i / 8] >> (i % 8) & 1) << 4;
}

void pack_legacy(int format, const uint8_t* block, uint8_t* out, int lane) {
  bool has_min = format == 21 || format == 23, five = format == 22 || format == 23;
  put_half(out, lane, block);
  block += 2, out += 2 * kPanel;
  if (has_min) {
    put_half(out, lane, block);
    block += 2, out += 2 * kPanel;
  }
  uint8_t codes[32];
  unpack_legacy(five ? block + 4 : block, five ? block : nullptr, codes);
  if (five) {
    put_high_bits(out, lane, codes, 32, 1);
    out += 4 * kPanel;
  }
  put_nibbles(out, lane, codes, 32);
}

// The eight 6-bit scales and minima of q4_k and q5_k, out of 12 bytes.
void unpack_k_scales(const uint8_t* packed, uint8_t* scales, uint8_t* minima) {
  for (int j = 0; j < 4; j++) {
    scales[j] = packed[j] & 63;
    minima[j] = packed[j + 4] & 63;
    scales[j + 4] = (packed[j + 8] & 15) | (packed[j] >> 6) << 4;
    minima[j + 4] = packed[j + 8] >> 4 | (packed[j + 4] >> 6) << 4;
  }
}

void pack_k(bool five, const uint8_t* block, uint8_t* out, int lane) {
  put_half(out, lane, block);
  put_half(out + 2 * kPanel, lane, block + 2);
  uint8_t scales[8], minima[8];
  unpack_k_scales(block + 4, scales, minima);
  put_bytes(out + 4 * kPanel, lane, scales, 8);
  put_bytes(out + 12 * kPanel, lane, minima, 8);
  const uint8_t* fifth = block + 16;
  const uint8_t* nibbles = five ? block + 48 : block + 16;
  int64_t sub_bytes = (five ? 4 * kPanel : 0) + 4 * kPlane4;
  for (int j = 0; j < 8; j++) {
    uint8_t codes[32];
    for (int i = 0; i < 32; i++) {
      uint8_t both = nibbles[j / 2 * 32 + i];
      codes[i] = j % 2 ? both >> 4 : both & 15;
      if (five) codes[i] |= (fifth[i] >> j & 1) << 4;
    }
    uint8_t* sub = out + 20 * kPanel + j * sub_bytes;
    if (five) put_high_bits(sub, lane, codes, 32, 1);
    put_nibbles(five ? sub + 4 * kPanel : sub, lane, codes, 32);
  }
}

void pack_q6_k(const uint8_t* block, uint8_t* out, int lane) {
  const uint8_t *low = block, *high = block + 128, *scales = block + 192;
  put_half(out, lane, block + 208);
  put_bytes(out + 2 * kPanel, lane, scales, 16);
  int64_t sub_bytes = 4 * kPanel + 2 * kPlane4;
  for (int j = 0; j < 16; j++) {
    uint8_t codes[16];
    for (int i = 0; i < 16; i++) {
      int at = 16 * j + i, half = at / 128, quarter = at / 32 % 4, column = at % 32;
      uint8_t both = low[half * 64 + quarter % 2 * 32 + column];
      uint8_t two = high[half * 32 + column] >> (2 * quarter) & 3;
      codes[i] = (quarter < 2 ? both & 15 : both >> 4) | two << 4;
    }
    uint8_t* sub = out + 18 * kPanel + j * sub_bytes;
    put_high_bits(sub, lane, codes, 16, 2);
    put_nibbles(sub + 4 * kPanel, lane, codes, 16);
  }
}

void pack_mxfp4(const uint8_t* block, uint8_t* out, int lane) {
  out[lane] = block[0];
  uint8_t codes[32];
  unpack_legacy(block + 1, nullptr, codes);
  put_nibbles(out + kPanel, lane, codes, 32);
}

struct Block {
  int64_t size, bytes, packed;  // inputs, bytes of a block in the file, bytes of 32 in a panel
};

bool block_of(int format, Block* block) {
  switch (format) {
    case 20: *block = {32, 18, 2 * kPanel + 4 * kPlane4}; return true;
    case 21: *block = {32, 20, 4 * kPanel + 4 * kPlane4}; return true;
    case 22: *block = {32, 22, 6 * kPanel + 4 * kPlane4}; return true;
    case 23: *block = {32, 24, 8 * kPanel + 4 * kPlane4}; return true;
    case 24: *block = {32, 34, 34 * kPanel}; return true;
    case 25: *block = {256, 144, 20 * kPanel + 32 * kPlane4}; return true;
    case 26: *block = {256, 176, 52 * kPanel + 32 * kPlane4}; return true;
    case 27: *block = {256, 210, 82 * kPanel + 32 * kPlane4}; return true;
    case 28: *block = {32, 17, kPanel + 4 * kPlane4}; return true;
  }
  return false;
}

void pack_block_row(const Rows& rows, const Block& form, int64_t n, int lane, uint8_t* out) {
  const uint8_t* block = rows.codes + n * rows.row_bytes;
  for (int64_t k = 0; k < rows.k; k += form.size, block += form.bytes, out += form.packed) {
    switch (rows.format) {
      case 24:
        put_half(out, lane, block);
        put_bytes(out + 2 * kPanel, lane, block + 2, 32);
        break;
      case 25: pack_k(false, block, out, lane); break;
      case 26: pack_k(true, block, out, lane); break;
      case 27: pack_q6_k(block, out, lane); break;
      case 28: pack_mxfp4(block, out, lane); break;
      default: pack_legacy(rows.format, block, out, lane);
    }
  }
}

int64_t group_bytes(int format, int64_t group) {
  switch (format) {
    case 10: return 5 * kPanel + group * (kPanel / 2);
    case 11: return 5 * kPanel + group * kPanel;
    default: return 4 * kPanel + group * kPanel;
  }
}

void pack_grouped_row(const Rows& rows, int64_t n, int lane, uint8_t* out) {
  int64_t groups = rows.k / rows.group, bytes = group_bytes(rows.format, rows.group);
  const uint8_t* codes = rows.codes + n * rows.row_bytes;
  for (int64_t g = 0; g < groups; g++, out += bytes) {
    std::memcpy(out + 4 * lane, rows.scales + n * groups + g, 4);
    uint8_t* planes = out + 4 * kPanel;
    if (rows.format != 12) {
      if (rows.zeros != nullptr) planes[lane] = rows.zeros[n * groups + g];
      planes += kPanel;
    }
    if (rows.format == 10) {
      for (int64_t i = 0; i < rows.group; i++) {
        int64_t at = g * rows.group + i;
        uint8_t code = codes[at / 2] >> (at % 2 * 4) & 15;
        add_word(planes + i / 8 * kPlane4, lane, (uint32_t)code << nibble_shift(i % 8));
      }
    } else {
      put_bytes(planes, lane, codes + g * rows.group, rows.group);
    }
  }
}

void pack_dense_row(const Rows& rows, int64_t n, int lane, uint8_t* out) {
  int64_t size = rows.format == 0 ? 4 : 2;
  const uint8_t* values = rows.codes + n * rows.row_bytes;
  for (int64_t k = 0; k < rows.k; k++)
    std::memcpy(out + (k * kPanel + lane) * size, values + k * size, size);
}

}  // namespace

int64_t panel_bytes(int format, int64_t k, int64_t group) {
  Block block;
  if (block_of(format, &block)) return k % block.size ? -1 : k / block.size * block.packed;
  if (format == 0) return k * kPanel * 4;
  if (format == 1 || format == 2) return k * kPanel * 2;
  if (format < 10 || format > 12 || group < 1 || k % group || (format == 10 && group % 8)) return -1;
  return k / group * group_bytes(format, group);
}

void pack_panels(const Rows& rows, int64_t first, int64_t last, uint8_t* out) {
  int64_t bytes = panel_bytes(rows.format, rows.k, rows.group);
  Block block;
  bool blocks = block_of(rows.format, &block);
  std::memset(out, 0, (size_t)((last - first) * bytes));
  for (int64_t n = first * kPanel; n < last * kPanel && n < rows.n; n++) {
    uint8_t* panel = out + (n / kPanel - first) * bytes;
    int lane = (int)(n % kPanel);
    if (blocks) {
      pack_block_row(rows, block, n, lane, panel);
    } else if (rows.format < 10) {
      pack_dense_row(rows, n, lane, panel);
    } else {
      pack_grouped_row(rows, n, lane, panel);
    }
  }
}

}  // namespace jaxserve
