// One ISA level's table of kernels, and its operators that are small to compile. Compiled once for
// each level, with its flags, its number (HR_LEVEL) and its name (HR_NAME).
#include "attention_room.h"
#include "bags.h"
#include "draw.h"
#include "entries.h"
#include "experts.h"
#include "gate_up.h"
#include "head.h"
#include "latent.h"
#include "levels.h"
#include "lora.h"
#include "pack.h"
#include "pictures.h"
#include "products.h"
#include "recurrence.h"
#include "rope.h"
#include "rows.h"

namespace {

void op_embed(const HrEmbed& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  const int64_t* index = op.index == HR_TOKENS      ? work.step->tokens
                         : op.index == HR_POSITIONS ? work.step->positions
                         : op.index == HR_TYPES     ? work.step->types
                                                    : work.step->labels;
  for (int64_t n = first; n < last; ++n)
    hr::expand_row(op.kind, op.data + index[n] * op.row_bytes, op.size, op.scale,
                   op.y + n * op.y_stride);
}

void op_scatter(const HrScatter& op, const hr::Work& work) {
  int64_t first, last;
  work.share(op.count, &first, &last);
  for (int64_t m = first; m < last; ++m) {
    float* y = op.y + op.places[m] * op.y_stride;
    const float* x = op.x + m * op.x_stride;
    if (!op.adds) memcpy(y, x, sizeof(float) * op.size);
    else for (int64_t i = 0; i < op.size; ++i) y[i] += x[i];
  }
}

void op_attention(const HrAttention& op, const hr::Work& work) {
  if (!in_codes(op.kv.kind)) return hr::HR_NAME::attention_floats(op, work);
  if (op.coarse) return hr::HR_NAME::attention_coarse(op, work);
  hr::HR_NAME::attention_codes(op, work);
}

#define HR_RUN(NAME, FUNCTION) \
  case HR_OP_##NAME: return FUNCTION(hr::op_of<HR_OP_##NAME>(record), work);

void run(const HrRecord& record, const hr::Work& work) {
  switch (record.code) {
    HR_RUN(EMBED, op_embed)
    HR_RUN(SCATTER, op_scatter)
    HR_RUN(BAGS, op_bags)
    HR_RUN(MODULATE, op_modulate)
    HR_RUN(AROUND, op_around)
    HR_RUN(GROUP_NORM, op_group_norm)
    HR_RUN(NORM, op_norm)
    HR_RUN(QUANTISE, op_quantise)
    HR_RUN(LINEAR, op_linear)
    HR_RUN(ROPE, op_rope)
    HR_RUN(ATTENTION, op_attention)
    HR_RUN(GATED, op_gated<true>)
    HR_RUN(ACTIVATE, op_gated<false>)
    HR_RUN(LAYER_NORM, op_layer_norm)
    HR_RUN(BIDIRECTIONAL, hr::HR_NAME::bidirectional)
    HR_RUN(GATE_UP, op_gate_up)
    HR_RUN(HEADS, op_heads)
    HR_RUN(COLUMNS, op_columns)
    HR_RUN(SELECT, op_select)
    HR_RUN(ADD, op_add)
    HR_RUN(LORA_DOWN, op_lora_down)
    HR_RUN(LORA_UP, op_lora_up)
    HR_RUN(BOUND, op_bound)
    HR_RUN(BEST, op_best)
    HR_RUN(PICK, op_pick)
    HR_RUN(LOWER, op_lower)
    HR_RUN(AGREE, op_agree)
    HR_RUN(SAMPLE, op_sample)
    HR_RUN(DRAW, op_draw)
    HR_RUN(SOFTCAP, op_logits<true>)
    HR_RUN(SCALE, op_logits<false>)
    HR_RUN(CONV, op_conv)
    HR_RUN(RECURRENCE, op_recurrence)
    HR_RUN(MULTIPLY, op_multiply)
    HR_RUN(ROUTE, op_route)
    HR_RUN(PLACE, op_place)
    HR_RUN(EXPERTS_UP, op_experts_up)
    HR_RUN(EXPERTS_DOWN, op_experts_down)
    HR_RUN(EXPERTS_SUM, op_experts_sum)
  }
}
#undef HR_RUN

hr::Room scratch_of(const HrRecord& record, const HrStep& step, int threads) {
  switch (record.code) {
    case HR_OP_ATTENTION: return attention_room(hr::op_of<HR_OP_ATTENTION>(record), step, threads);
    case HR_OP_ROPE: return {13 * hr::op_of<HR_OP_ROPE>(record).kv.head_dim, 0};
    case HR_OP_BIDIRECTIONAL:
      return hr::HR_NAME::bidirectional_room(hr::op_of<HR_OP_BIDIRECTIONAL>(record), step);
    case HR_OP_GROUP_NORM:
      return {group_norm_scratch(hr::op_of<HR_OP_GROUP_NORM>(record)), 0};
    case HR_OP_BOUND: return {bound_scratch(hr::op_of<HR_OP_BOUND>(record)), 0};
    case HR_OP_DRAW:
    case HR_OP_SAMPLE: return {kDrawScratch, 0};
    case HR_OP_RECURRENCE: return {recurrence_scratch(hr::op_of<HR_OP_RECURRENCE>(record)), 0};
    case HR_OP_ROUTE: return {route_scratch(hr::op_of<HR_OP_ROUTE>(record)), 0};
    case HR_OP_PLACE:
    case HR_OP_EXPERTS_UP:
    case HR_OP_EXPERTS_DOWN: return {experts_scratch(hr::op_of<HR_OP_PLACE>(record)), 0};
    default: return {0, 0};
  }
}

// The integer ceiling: products of registers in independent chains. Where one instruction multiplies
// and adds, no memory; elsewhere the sum alone is chained, and a compiler would multiply once for all
// products of the same numbers, so each has its own load from L1.
double integer_peak(int64_t iterations) {
  constexpr int kChains = kOneDot ? 12 : 4;
  alignas(64) uint8_t codes[64] = {3, 1, 2};
  const uint8_t* from = codes;
  I acc[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) acc[i] = i_set(i);
  C w = c_load(from);
  int32_t a4 = 0x01020304;
  for (int64_t k = 0; k < iterations; k += 4) {
    __asm__ volatile("" : "+r"(a4));  // one broadcast per 4 · kChains products, and no folding
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) {
        if constexpr (!kOneDot) {
          __asm__ volatile("" : "+r"(from) : : "memory");
          w = c_load(from);
        }
        acc[i] = dot7(acc[i], w, a4);
      }
  }
  I total = acc[0];
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) total = i_add(total, acc[i]);
  volatile int32_t keep = i_sum(total);
  (void)keep;
  return static_cast<double>(iterations) * kChains * 128;
}

// The bandwidth ceiling: four streams' worth of loads, one pass.
uint64_t read_stream(const uint8_t* data, int64_t bytes) {
  I acc[4] = {i_zero(), i_zero(), i_zero(), i_zero()};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      prefetch_l1(data + i + 64 * j + 1024);
      acc[j] = i_add(acc[j], i_load(reinterpret_cast<const int32_t*>(data + i + 64 * j)));
    }
  }
  return static_cast<uint64_t>(i_sum(i_add(i_add(acc[0], acc[1]), i_add(acc[2], acc[3]))));
}

}  // namespace

#define HR_TEXT(name) #name
#define HR_TEXT_OF(name) HR_TEXT(name)

namespace hr::HR_NAME {
extern const Kernels kernels{HR_TEXT_OF(HR_NAME), run, scratch_of, integer_peak, read_stream};
}
