// One ISA level's table of kernels, and its operators that are small to compile. Compiled once for
// each level, with its flags, its number (HR_LEVEL) and its name (HR_NAME).
#include "attention_room.h"
#include "draw.h"
#include "entries.h"
#include "experts.h"
#include "gate_up.h"
#include "head.h"
#include "latent.h"
#include "levels.h"
#include "lora.h"
#include "pack.h"
#include "products.h"
#include "recurrence.h"
#include "rope.h"
#include "rows.h"

namespace {

void op_embed(const HrEmbed& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.step->n, &first, &last);
  const int64_t* index = op.index == HR_TOKENS      ? work.step->tokens
                         : op.index == HR_POSITIONS ? work.step->positions
                                                    : work.step->types;
  for (int64_t n = first; n < last; ++n)
    hr::expand_row(op.kind, op.data + index[n] * op.row_bytes, op.size, op.scale,
                   op.y + n * op.y_stride);
}

void op_scatter(const HrScatter& op, const hr::Work& work) {
  int64_t first, last;
  work.share(op.count, &first, &last);
  for (int64_t m = first; m < last; ++m)
    memcpy(op.y + op.places[m] * op.y_stride, op.x + m * op.x_stride, sizeof(float) * op.size);
}

void op_attention(const HrAttention& op, const hr::Work& work) {
  if (!in_codes(op.kv.kind)) return hr::HR_NAME::attention_floats(op, work);
  if (op.coarse) return hr::HR_NAME::attention_coarse(op, work);
  hr::HR_NAME::attention_codes(op, work);
}

void run(const HrRecord& record, const hr::Work& work) {
  switch (record.code) {
    case HR_OP_EMBED: return op_embed(*static_cast<const HrEmbed*>(record.op), work);
    case HR_OP_SCATTER: return op_scatter(*static_cast<const HrScatter*>(record.op), work);
    case HR_OP_NORM: return op_norm(*static_cast<const HrNorm*>(record.op), work);
    case HR_OP_QUANTISE: return op_quantise(*static_cast<const HrQuantise*>(record.op), work);
    case HR_OP_LINEAR: return op_linear(*static_cast<const HrLinear*>(record.op), work);
    case HR_OP_ROPE: return op_rope(*static_cast<const HrRope*>(record.op), work);
    case HR_OP_ATTENTION: return op_attention(*static_cast<const HrAttention*>(record.op), work);
    case HR_OP_GATED: return op_gated<true>(*static_cast<const HrGated*>(record.op), work);
    case HR_OP_ACTIVATE: return op_gated<false>(*static_cast<const HrGated*>(record.op), work);
    case HR_OP_LAYER_NORM: return op_layer_norm(*static_cast<const HrLayerNorm*>(record.op), work);
    case HR_OP_BIDIRECTIONAL:
      return hr::HR_NAME::bidirectional(*static_cast<const HrBidirectional*>(record.op), work);
    case HR_OP_GATE_UP: return op_gate_up(*static_cast<const HrGateUp*>(record.op), work);
    case HR_OP_HEADS: return op_heads(*static_cast<const HrHeads*>(record.op), work);
    case HR_OP_COLUMNS: return op_columns(*static_cast<const HrColumns*>(record.op), work);
    case HR_OP_SELECT: return op_select(*static_cast<const HrRowsOp*>(record.op), work);
    case HR_OP_ADD: return op_add(*static_cast<const HrRowsOp*>(record.op), work);
    case HR_OP_LORA_DOWN: return op_lora_down(*static_cast<const HrLora*>(record.op), work);
    case HR_OP_LORA_UP: return op_lora_up(*static_cast<const HrLora*>(record.op), work);
    case HR_OP_BOUND: return op_bound(*static_cast<const HrHead*>(record.op), work);
    case HR_OP_BEST: return op_best(*static_cast<const HrHead*>(record.op), work);
    case HR_OP_PICK: return op_pick(*static_cast<const HrHead*>(record.op), work);
    case HR_OP_LOWER: return op_lower(*static_cast<const HrHead*>(record.op), work);
    case HR_OP_AGREE: return op_agree(*static_cast<const HrAgree*>(record.op), work);
    case HR_OP_SAMPLE: return op_sample(*static_cast<const HrSample*>(record.op), work);
    case HR_OP_DRAW: return op_draw(*static_cast<const HrDraw*>(record.op), work);
    case HR_OP_SOFTCAP: return op_logits<true>(*static_cast<const HrRowsOp*>(record.op), work);
    case HR_OP_SCALE: return op_logits<false>(*static_cast<const HrRowsOp*>(record.op), work);
    case HR_OP_CONV:
    case HR_OP_RECURRENCE:
    case HR_OP_MULTIPLY: return run_states(record, work);
    default: return run_mixture(record, work);
  }
}

hr::Room scratch_of(const HrRecord& record, const HrStep& step, int threads) {
  if (record.code == HR_OP_ATTENTION)
    return attention_room(*static_cast<const HrAttention*>(record.op), step, threads);
  if (record.code == HR_OP_ROPE) return {9 * static_cast<const HrRope*>(record.op)->kv.head_dim, 0};
  if (record.code == HR_OP_BIDIRECTIONAL)
    return hr::HR_NAME::bidirectional_room(*static_cast<const HrBidirectional*>(record.op), step);
  if (record.code == HR_OP_BOUND)
    return {bound_scratch(*static_cast<const HrHead*>(record.op)), 0};
  if (record.code == HR_OP_DRAW || record.code == HR_OP_SAMPLE) return {kDrawScratch, 0};
  if (record.code == HR_OP_RECURRENCE)
    return {recurrence_scratch(*static_cast<const HrRecurrence*>(record.op)), 0};
  return {mixture_scratch(record), 0};
}

// The integer ceiling: products of registers, twelve independent chains, no memory.
double integer_peak(int64_t iterations) {
  I acc[12];
  for (int i = 0; i < 12; ++i) acc[i] = i_set(i);
  C w = c_set(3);
  int32_t a4 = 0x01020304;
  for (int64_t k = 0; k < iterations; k += 4) {
    __asm__ volatile("" : "+r"(a4));  // one broadcast per 48 products, and no folding
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
#pragma GCC unroll 12
      for (int i = 0; i < 12; ++i) acc[i] = dot7(acc[i], w, a4);
  }
  I total = acc[0];
  for (int i = 1; i < 12; ++i) total = i_add(total, acc[i]);
  volatile int32_t keep = i_sum(total);
  (void)keep;
  return static_cast<double>(iterations) * 12 * 128;
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
