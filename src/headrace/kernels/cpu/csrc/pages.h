// Pages of the KV cache: how K and V of one KV head lie in a block of S positions.
//
// The products want lanes that are never summed with one another: scores have positions as lanes,
// results have E as lanes. So K lies transposed in its page and V does not, and where two values
// make one product (bf16), or four (codes), they lie side by side:
//
//   kind        K page           V page           scales
//   F32, F16    [E][S]           [S][E]
//   BF16        [E/2][S][2]      [S/2][E][2]
//   I8          [E/4][S][4]      [S/4][E][4]      [S] bf16 for K, [S] for V: max|x| / 127 a head
//   K8V4        [E/4][S][4]      [S/4][E/2][4]    the same for K; of V see value_codes.h
//
// Codes of K have 128 added, as vpdpbusd wants one side without a sign; those of V have theirs.
// Of latent attention K is V too: there is no V page (`HrKv.v` is null).
//
// A page is written a token at a time and two threads may write neighbouring tokens: every store
// below covers the bytes of its own token and no others.
#pragma once
#include "codes.h"
#include "pairs.h"
#include "value_codes.h"
#include "work.h"

namespace {

HR_INLINE bool in_codes(int kind) { return kind == HR_I8 || kind == HR_K8V4; }

// Index of the first value of the page of head g in block `block`; the scales' page has S values.
HR_INLINE int64_t page_of(const HrKv& kv, int64_t block, int64_t g) {
  return (block * kv.kv_heads + g) * kv.head_dim * kv.block_size;
}

template <class T>
HR_INLINE void put(T* base, int64_t at, const T* from, int64_t count, int64_t stride, int64_t run) {
  for (int64_t i = 0; i < count; i += run)
    memcpy(base + at + i / run * stride, from + i, sizeof(T) * static_cast<size_t>(run));
}

// Codes of a head x [E] and the scale that they count, which is rounded up: no code is clipped.
HR_INLINE uint16_t quantise_head(const float* x, int64_t size, int8_t* codes) {
  F top = f_zero();
  for (int64_t i = 0; i < size; i += 16) {
    F v = f_load(x + i);
    top = f_max(top, f_max(v, f_sub(f_zero(), v)));
  }
  float scale = f_highest(top) / 127.0f;
  if (!(scale >= 1.17549435e-38f)) scale = 1.17549435e-38f;  // the smallest normal number
  const uint16_t kept = bf16_above(scale);
  F s = f_set(float_of(kept)), high = f_set(127.0f), low = f_set(-127.0f);
  F bad = f_zero();
  for (int64_t i = 0; i < size; i += 16) {
    F v = f_load(x + i);
    bad = f_fma(v, f_zero(), bad);  // NaN as soon as one value is infinite or none
    i_store_s8(codes + i, i_round(f_min(f_max(f_div(v, s), low), high)));
  }
  return f_sum(bad) == 0 ? kept : kNotANumber;  // in the scale it stays one
}

// K and V [E] of head g to slot block · S + offset. `room`: 5 · E bytes of work space.
HR_INLINE void write_kv(const HrKv& kv, int64_t slot, int64_t g, const float* k, const float* v,
                        uint8_t* room) {
  const int64_t size = kv.head_dim, block = kv.block_size, at = slot % block;
  const int64_t page = page_of(kv, slot / block, g);
  switch (kv.kind) {
    case HR_F32:
      put(static_cast<float*>(kv.k), page + at, k, size, block, 1);
      if (kv.v) memcpy(static_cast<float*>(kv.v) + page + at * size, v, static_cast<size_t>(size) * 4);
      return;
    case HR_I8:
    case HR_K8V4: {
      auto* codes = reinterpret_cast<int8_t*>(room);
      const int64_t scale = (slot / block * kv.kv_heads + g) * block + at;
      kv.k_scale[scale] = quantise_head(k, size, codes);
      for (int64_t i = 0; i < size; ++i) room[i] ^= kCellZero;
      put(static_cast<uint8_t*>(kv.k), page + 4 * at, room, size, 4 * block, 4);
      if (!kv.v) return;
      if (kv.kind == HR_K8V4) {
        uint8_t* packed = room + 4 * size;
        kv.v_scale[scale] = quantise_values(v, size, packed, reinterpret_cast<float*>(room));
        const int64_t first = page / 2 + at / 4 * 2 * size + at % 4;
        put(static_cast<uint8_t*>(kv.v), first, packed, size / 2, 4, 1);
        return;
      }
      kv.v_scale[scale] = quantise_head(v, size, codes);
      put(static_cast<int8_t*>(kv.v), page + at / 4 * 4 * size + at % 4, codes, size, 4, 1);
      return;
    }
    default: {
      auto* narrow = reinterpret_cast<uint16_t*>(room);
      const bool half = kv.kind == HR_F16;
      for (int64_t i = 0; i < size; i += 16)
        half ? f_store_half(narrow + i, f_load(k + i)) : f_store_bf16(narrow + i, f_load(k + i));
      if (half) put(static_cast<uint16_t*>(kv.k), page + at, narrow, size, block, 1);
      else put(static_cast<uint16_t*>(kv.k), page + 2 * at, narrow, size, 2 * block, 2);
      if (!kv.v) return;
      for (int64_t i = 0; i < size; i += 16)
        half ? f_store_half(narrow + i, f_load(v + i)) : f_store_bf16(narrow + i, f_load(v + i));
      if (half) put(static_cast<uint16_t*>(kv.v), page + at * size, narrow, size, size, size);
      else put(static_cast<uint16_t*>(kv.v), page + at / 2 * 2 * size + at % 2, narrow, size, 2, 1);
    }
  }
}

}  // namespace
