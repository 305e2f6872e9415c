// From GGUF blocks and checkpoints' codes to panels, and from GGUF blocks to float rows.
//
// Once per weight and machine: reads 18 to 210 bytes a block, writes as many. The block formats
// are ggml's (their definition is the format's documentation); nothing here rounds.
#include "pack.h"

#include <string.h>

#include "half.h"
#include "layout.h"

namespace hr {
namespace {

uint16_t read16(const uint8_t* p) {
  uint16_t x;
  memcpy(&x, p, 2);
  return x;
}

uint32_t read32(const uint8_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

// The 6-bit scale and min of sub-block j of a Q4_K or Q5_K block (12 bytes for eight pairs).
void scale_min(int j, const uint8_t* q, uint8_t* scale, uint8_t* min) {
  if (j < 4) {
    *scale = q[j] & 63;
    *min = q[j + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((q[j + 4] & 15) | ((q[j - 4] >> 6) << 4));
    *min = static_cast<uint8_t>((q[j + 4] >> 4) | ((q[j] >> 6) << 4));
  }
}

// One block of one output, taken apart: codes in order of K, and its scales.
struct Parts {
  uint8_t codes[256];
  uint16_t d = 0, m = 0;
  float wide = 0;      // INT4, INT8, NVFP4: their d
  uint8_t scales[16];  // K formats, NVFP4: per 32 or 16 (Q6_K: signed); [0]: MXFP4's e, INT4's z
  uint8_t mins[8];
};

void take_nibbles(const uint8_t* q, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = q[i] & 15;
    codes[i + 16] = q[i] >> 4;
  }
}

// Eight bits spread over the fifth bits of eight bytes.
struct Spread {
  uint64_t of[256] = {};
  constexpr Spread() {
    for (uint64_t byte = 0; byte < 256; ++byte)
      for (uint64_t bit = 0; bit < 8; ++bit) of[byte] |= ((byte >> bit) & 1) << (8 * bit + 4);
  }
};
constexpr Spread kSpread;

void take_fifth(uint32_t bits, uint8_t* codes) {
  for (int i = 0; i < 4; ++i) {
    uint64_t eight;
    memcpy(&eight, codes + 8 * i, 8);
    eight |= kSpread.of[(bits >> (8 * i)) & 255];
    memcpy(codes + 8 * i, &eight, 8);
  }
}

void take_apart(int kind, const uint8_t* b, Parts* p) {
  switch (kind) {
    case HR_Q4_0:
    case HR_IQ4_NL:
      p->d = read16(b);
      take_nibbles(b + 2, p->codes);
      break;
    case HR_Q4_1:
      p->d = read16(b);
      p->m = read16(b + 2);
      take_nibbles(b + 4, p->codes);
      break;
    case HR_Q5_0:
      p->d = read16(b);
      take_nibbles(b + 6, p->codes);
      take_fifth(read32(b + 2), p->codes);
      break;
    case HR_Q5_1:
      p->d = read16(b);
      p->m = read16(b + 2);
      take_nibbles(b + 8, p->codes);
      take_fifth(read32(b + 4), p->codes);
      break;
    case HR_Q8_0:
    case HR_Q8_0_PLANES:
      p->d = read16(b);
      for (int i = 0; i < 32; ++i) p->codes[i] = b[2 + i] ^ 0x80;
      break;
    case HR_MXFP4:
      p->scales[0] = b[0];
      take_nibbles(b + 1, p->codes);
      break;
    case HR_Q4_K:
    case HR_Q5_K: {
      p->d = read16(b);
      p->m = read16(b + 2);
      for (int j = 0; j < 8; ++j) scale_min(j, b + 4, &p->scales[j], &p->mins[j]);
      const uint8_t* high = b + 16;
      const uint8_t* low = kind == HR_Q4_K ? b + 16 : b + 48;
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 32; ++i) {
          uint8_t x = low[32 * j + i];
          uint8_t first = x & 15, second = x >> 4;
          if (kind == HR_Q5_K) {
            first |= static_cast<uint8_t>(((high[i] >> (2 * j)) & 1) << 4);
            second |= static_cast<uint8_t>(((high[i] >> (2 * j + 1)) & 1) << 4);
          }
          p->codes[64 * j + i] = first;
          p->codes[64 * j + 32 + i] = second;
        }
      break;
    }
    case HR_IQ4_XS:
      p->d = read16(b);
      for (int j = 0; j < 8; ++j) {
        const int low = (b[4 + j / 2] >> (4 * (j % 2))) & 15, high = (read16(b + 2) >> (2 * j)) & 3;
        p->scales[j] = static_cast<uint8_t>((low | (high << 4)) - 32);
        take_nibbles(b + 8 + 16 * j, p->codes + 32 * j);
      }
      break;
    case HR_Q6_K: {
      const uint8_t* low = b;
      const uint8_t* high = b + 128;
      memcpy(p->scales, b + 192, 16);
      p->d = read16(b + 208);
      for (int half = 0; half < 2; ++half, low += 64, high += 32)
        for (int i = 0; i < 32; ++i) {
          uint8_t* c = p->codes + 128 * half + i;
          c[0] = static_cast<uint8_t>((low[i] & 15) | (((high[i] >> 0) & 3) << 4));
          c[32] = static_cast<uint8_t>((low[i + 32] & 15) | (((high[i] >> 2) & 3) << 4));
          c[64] = static_cast<uint8_t>((low[i] >> 4) | (((high[i] >> 4) & 3) << 4));
          c[96] = static_cast<uint8_t>((low[i + 32] >> 4) | (((high[i] >> 6) & 3) << 4));
        }
      break;
    }
  }
}

// Codes of one output and one unit into the panel's unit: bytes 4o … 4o + 3 of every vector.
void place_unit(const Format& f, const uint8_t* codes, int o, uint8_t* unit) {
  if (f.code_bytes == 512) {
    for (int s = 0; s < 8; ++s) memcpy(unit + 64 * s + 4 * o, codes + 4 * s, 4);
    return;
  }
  for (int j = 0; j < 4; ++j) {
    uint32_t low = read32(codes + 4 * j), high = read32(codes + 4 * (j + 4));
    uint32_t both = (low & 0x0f0f0f0fu) | ((high & 0x0f0f0f0fu) << 4);
    memcpy(unit + 64 * j + 4 * o, &both, 4);
  }
  if (f.code_bytes == 320) {
    uint32_t bits = 0;
    for (int s = 0; s < 8; ++s) bits |= ((read32(codes + 4 * s) >> 4) & 0x01010101u) << s;
    memcpy(unit + 256 + 4 * o, &bits, 4);
  } else if (f.code_bytes == 384) {
    for (int v = 0; v < 2; ++v) {
      uint32_t pairs = 0;
      for (int t = 0; t < 4; ++t)
        pairs |= ((read32(codes + 16 * v + 4 * t) >> 4) & 0x03030303u) << (2 * t);
      memcpy(unit + 256 + 64 * v + 4 * o, &pairs, 4);
    }
  }
}

// The same into two planes: layout.h says which bit lies where.
void place_planes(const uint8_t* codes, int o, uint8_t* unit, uint8_t* low) {
  uint32_t bits = 0, threes[3] = {};
  for (int j = 0; j < 4; ++j) {
    const uint32_t first = read32(codes + 4 * j), second = read32(codes + 4 * (j + 4));
    const uint32_t nibbles = ((first >> 4) & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
    const uint32_t rest = (first & 0x0f0f0f0fu) | ((second & 0x0f0f0f0fu) << 4);
    memcpy(unit + 64 * j + 4 * o, &nibbles, 4);
    bits |= (rest & 0x88888888u) >> j;
    if (j < 3)
      threes[j] |= rest & 0x77777777u;
    else
      for (int i = 0; i < 3; ++i) threes[i] |= ((rest >> i) & 0x11111111u) << 3;
  }
  memcpy(unit + 256 + 4 * o, &bits, 4);
  for (int i = 0; i < 3; ++i) memcpy(low + 64 * i + 4 * o, &threes[i], 4);
}

// take(o, &parts): the block of output o, taken apart.
template <class Take>
void pack_block(const Format& f, int count, uint8_t* out, uint8_t* low, Take take) {
  if (count < HR_PANEL) {
    memset(out, 0, static_cast<size_t>(f.block_bytes()));
    memset(low, 0, static_cast<size_t>(f.units() * f.low_bytes));
  }
  Parts p;
  for (int o = 0; o < count; ++o) {
    take(o, &p);
    if (f.kind == HR_INT4 || f.kind == HR_INT8) memcpy(out + 4 * o, &p.wide, 4);
    else if (f.kind == HR_NVFP4) memcpy(out + 4 * (o % 4), &p.wide, 4);
    else if (f.kind == HR_MXFP4) out[o] = p.scales[0];
    else memcpy(out + 2 * o, &p.d, 2);
    if (f.kind == HR_INT4) out[64 + o] = p.scales[0];
    else if (f.header == 64 && f.kind != HR_INT8) memcpy(out + 32 + 2 * o, &p.m, 2);
    for (int u = 0; u < f.units(); ++u) {
      uint8_t* unit = out + f.header + u * f.unit_bytes();
      if (f.kind == HR_Q4_K || f.kind == HR_Q5_K) {
        unit[o] = p.scales[u];
        unit[16 + o] = p.mins[u];
      } else if (f.kind == HR_IQ4_XS) {
        unit[o] = p.scales[u];
      } else if (f.kind == HR_Q6_K || f.kind == HR_NVFP4) {
        unit[o] = p.scales[2 * u];
        unit[16 + o] = p.scales[2 * u + 1];
      }
      if (f.low_bytes)
        place_planes(p.codes + 32 * u, o, unit + f.unit_extra, low + u * f.low_bytes);
      else
        place_unit(f, p.codes + 32 * u, o, unit + f.unit_extra);
    }
  }
}

// Half of 2^(e − 127): see layout.h.
float half_power(uint8_t e) {
  const uint32_t bits = e ? static_cast<uint32_t>(e - 1) << 23 : 0;
  float power;
  memcpy(&power, &bits, 4);
  return power;
}

// Rows of numbers into a panel, where those of all outputs lie side by side; outputs that are not
// there are zeros.
template <class T>
void turn(const uint8_t* const* rows, int64_t count, int64_t in, uint8_t* panel) {
  if (count < HR_PANEL) memset(panel, 0, static_cast<size_t>(in) * HR_PANEL * sizeof(T));
  for (int64_t k = 0; k < in; ++k, panel += HR_PANEL * sizeof(T)) {
    const int64_t at = k * static_cast<int64_t>(sizeof(T));
    const auto move = [&](int64_t o) { memcpy(panel + o * sizeof(T), rows[o] + at, sizeof(T)); };
    if (count == HR_PANEL)
      for (int64_t o = 0; o < HR_PANEL; ++o) move(o);
    else
      for (int64_t o = 0; o < count; ++o) move(o);
  }
}

}  // namespace

void pack_panels(int kind, const uint8_t* rows, int64_t row_bytes, int64_t out, int64_t in,
                 int64_t first, int64_t last, uint8_t* target) {
  const Format* f = format_of(kind);
  const int64_t bytes = f ? in / f->span * f->block_bytes() : panel_bytes(kind, in);
  for (int64_t panel = first; panel < last; ++panel) {
    uint8_t* to = target + panel * bytes;
    uint8_t* low = f && f->low_bytes ? target + low_at(*f, out, in, panel) : to;
    const uint8_t* from[HR_PANEL];
    int64_t count = out - panel * HR_PANEL;
    if (count > HR_PANEL) count = HR_PANEL;
    for (int64_t o = 0; o < count; ++o) from[o] = rows + (panel * HR_PANEL + o) * row_bytes;
    if (f) {
      for (int64_t block = 0; block < in / f->span; ++block)
        pack_block(*f, static_cast<int>(count), to + block * f->block_bytes(),
                   low + block * f->units() * f->low_bytes, [&](int o, Parts* p) {
                     take_apart(f->kind, from[o] + block * f->file_bytes, p);
                   });
      continue;
    }
    if (dense_bytes(kind) == 4) turn<uint32_t>(from, count, in, to);
    else turn<uint16_t>(from, count, in, to);
  }
}

void pack_coded(int kind, const CodedRows& rows, int64_t out, int64_t in, int64_t first,
                int64_t last, uint8_t* target) {
  const Format* f = format_of(kind);
  const int64_t groups = (in + rows.group - 1) / rows.group, bytes = panel_bytes(kind, in);
  const bool wide = kind == HR_INT4 || kind == HR_INT8 || kind == HR_NVFP4;
  const auto* halves = static_cast<const uint16_t*>(rows.scales);
  const auto* floats = static_cast<const float*>(rows.scales);
  for (int64_t panel = first; panel < last; ++panel) {
    uint8_t* to = target + panel * bytes;
    const int64_t row = panel * HR_PANEL;
    const int count = static_cast<int>(out - row < HR_PANEL ? out - row : HR_PANEL);
    if (!f) {
      memset(to, 0, static_cast<size_t>(bytes));
      for (int o = 0; o < count; ++o) {
        for (int64_t k = 0; k < in; ++k) to[k * HR_PANEL + o] = rows.codes[(row + o) * in + k];
        for (int64_t g = 0; g < groups; ++g) {
          const float scale = floats[(row + o) * groups + g] * 256;
          memcpy(to + HR_PANEL * in + 4 * (g * HR_PANEL + o), &scale, 4);
        }
      }
      continue;
    }
    for (int64_t k = 0; k < in; k += f->span, to += f->block_bytes())
      pack_block(*f, count, to, to, [&](int o, Parts* p) {
        const int64_t group = (row + o) * groups + k / rows.group;
        memcpy(p->codes, rows.codes + (row + o) * in + k, static_cast<size_t>(f->span));
        if (kind == HR_NVFP4) p->wide = floats[0];
        else if (wide) p->wide = floats[group];
        else p->d = halves[group];
        if (kind == HR_NVFP4) memcpy(p->scales, rows.zeros + group, 4);
        else if (rows.zeros) p->scales[0] = rows.zeros[group];
      });
  }
}

void expand_row(int kind, const uint8_t* row, int64_t size, float scale, float* y) {
  const Format* f = format_of(kind);
  if (!f) {
    for (int64_t i = 0; i < size; ++i) {
      float x;
      if (kind == HR_F32) {
        memcpy(&x, row + 4 * i, 4);
      } else if (kind == HR_F16) {
        x = half_to_float(read16(row + 2 * i));
      } else {
        uint32_t bits = static_cast<uint32_t>(read16(row + 2 * i)) << 16;
        memcpy(&x, &bits, 4);
      }
      y[i] = x * scale;
    }
    return;
  }
  Parts p;
  for (int64_t block = 0; block < size / f->span; ++block, y += f->span) {
    take_apart(kind, row + block * f->file_bytes, &p);
    const float d = half_to_float(p.d), m = half_to_float(p.m);
    for (int i = 0; i < f->span; ++i) {
      const float c = static_cast<float>(p.codes[i]);
      float x = 0;
      switch (kind) {
        case HR_Q4_0: x = (c - 8) * d; break;
        case HR_Q5_0: x = (c - 16) * d; break;
        case HR_Q8_0: x = (c - 128) * d; break;
        case HR_MXFP4:
          x = static_cast<float>(kMxfp4Codes[p.codes[i]] - 16) * half_power(p.scales[0]);
          break;
        case HR_IQ4_NL: x = (kIq4Codes[p.codes[i]] - 128) * d; break;
        case HR_IQ4_XS:
          x = d * static_cast<int8_t>(p.scales[i / 32]) * (kIq4Codes[p.codes[i]] - 128);
          break;
        case HR_Q4_1:
        case HR_Q5_1: x = c * d + m; break;
        case HR_Q4_K:
        case HR_Q5_K: x = d * p.scales[i / 32] * c - m * p.mins[i / 32]; break;
        case HR_Q6_K: x = d * static_cast<int8_t>(p.scales[i / 16]) * (c - 32); break;
      }
      y[i] = x * scale;
    }
  }
}

}  // namespace hr
