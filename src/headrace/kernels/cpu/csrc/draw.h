// Draws one token per row of logits: temperature, min-p, top-k, top-p, as kernels/sampling.py
// defines them, each filter a threshold on the scaled logits.
//
// Arithmetic: the logits of a row are read twice (maximum, then masses: one exp for each) and a
// third time where filters leave something to collect; 0.6 MB per row of the default model, which
// stay in the cache. The second pass counts tokens and sums masses above a ladder of cuts below
// the peak, so that what the filters need is collected without a sort of the vocabulary: a few
// hundred candidates, of which k-th value and nucleus are exact. A row whose candidates do not fit
// (a flat distribution under a filter) gets −1 and is drawn by the reference.
//
// Masses are exp in fp32, summed in fp32 over 16 lanes of 32 steps and from there in fp64: a
// nucleus ends within a relative 1e-6 of where fp64 sums would end it. A row's token depends on its
// own logits and parameters alone.
#pragma once
#include <algorithm>
#include <functional>

#include "rows.h"
#include "simd.h"
#include "target.h"
#include "work.h"

namespace {

constexpr int64_t kDrawRoom = 32768;   // candidates
constexpr int64_t kDrawBlock = 512;    // tokens of which a sum is kept, where no filter is on
constexpr int64_t kDrawBlocks = 4096;
constexpr int kDrawCuts = 9;
constexpr int64_t kDrawScratch = kDrawRoom * 12 + kDrawBlocks * 8;
const float kDrawLadder[kDrawCuts] = {0.5f, 1.0f, 2.0f, 3.0f, 4.5f,
                                          6.0f, 8.0f, 10.0f, 13.0f};

HR_INLINE F draw_load(const float* p, int64_t left) {  // lanes beyond `left` are −∞
  if (left >= 16) return f_load(p);
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < left ? p[i] : -__builtin_inff();
  return f_load(t);
}

struct DrawRow {
  const float* logits;
  int64_t vocab;
  F temperature, peak;
};

HR_INLINE F draw_scaled(const DrawRow& row, int64_t i) {
  return f_div(draw_load(row.logits + i, row.vocab - i), row.temperature);
}

// The token of a block at which the masses before it reach `share` of the block's; else the last
// that has a mass. The sum is taken again in fp64, so that the share is of what is then gone through.
int64_t draw_in(const DrawRow& row, int64_t block, double share) {
  float mass[kDrawBlock];
  const int64_t first = block * kDrawBlock, count = std::min(row.vocab - first, kDrawBlock);
  for (int64_t i = 0; i < count; i += 16)
    f_store(mass + i, f_exp(f_sub(draw_scaled(row, first + i), row.peak)));
  double sum = 0, before = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(mass[i]);
  int64_t found = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (mass[i] > 0) found = first + i;
    before += static_cast<double>(mass[i]);
    if (before > share * sum && found == first + i) return found;
  }
  return found;
}

// No filter: sums of blocks, then the block in which the uniform number falls, token by token.
int64_t draw_any(const DrawRow& row, double uniform, double* sums) {
  const int64_t blocks = (row.vocab + kDrawBlock - 1) / kDrawBlock;
  if (blocks > kDrawBlocks) return -1;
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t end = std::min(row.vocab, (b + 1) * kDrawBlock);
    F sum = f_zero();
    for (int64_t i = b * kDrawBlock; i < end; i += 16)
      sum = f_add(sum, f_exp(f_sub(draw_scaled(row, i), row.peak)));
    sums[b] = static_cast<double>(f_sum(sum));
    total += sums[b];
  }
  if (!(total > 0) || total > 1e30) return -1;
  const double wanted = uniform * total;
  double before = 0;
  int64_t block = 0, last = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (sums[b] > 0) last = b;
    if (before + sums[b] > wanted) break;
    before += sums[b];
    block = b + 1;
  }
  if (block > last) return draw_in(row, last, 1.0);
  return draw_in(row, block, (wanted - before) / sums[block]);
}

// How far below the peak the candidates of the filters reach; infinity: nobody knows.
float draw_cut(const DrawRow& row, const HrDrawRow& rule, bool top_p, double* total) {
  F least[kDrawCuts], mass[kDrawCuts], all = f_zero();
  int64_t counts[kDrawCuts] = {0};
  double masses[kDrawCuts] = {0};
  for (int c = 0; c < kDrawCuts; ++c) {
    least[c] = f_sub(row.peak, f_set(kDrawLadder[c]));
    mass[c] = f_zero();
  }
  *total = 0;
  for (int64_t i = 0, step = 1; i < row.vocab; i += 16, ++step) {
    F x = draw_scaled(row, i);
    F e = f_exp(f_sub(x, row.peak));
    all = f_add(all, e);
    for (int c = 0; c < kDrawCuts; ++c) {
      counts[c] += __builtin_popcount(f_not_below(x, least[c]));
      mass[c] = f_add(mass[c], f_where(x, least[c], e));
    }
    if (step % 32 == 0 || i + 16 >= row.vocab) {
      *total += static_cast<double>(f_sum(all));
      all = f_zero();
      for (int c = 0; c < kDrawCuts; ++c) {
        masses[c] += static_cast<double>(f_sum(mass[c]));
        mass[c] = f_zero();
      }
    }
  }
  for (int c = 0; c < kDrawCuts; ++c) {
    if (rule.top_k > 0 && counts[c] < rule.top_k) continue;
    // A hair more than the target, for what the sums round.
    if (rule.top_k <= 0 && top_p && masses[c] < (static_cast<double>(rule.top_p) + 1e-5) * *total)
      continue;
    return kDrawLadder[c];
  }
  return __builtin_inff();
}

int64_t draw_row(const float* logits, int64_t vocab, const HrDrawRow& rule, uint8_t* scratch) {
  DrawRow row{logits, vocab, f_set(rule.temperature), f_zero()};
  F highest = f_set(-__builtin_inff());
  for (int64_t i = 0; i < vocab; i += 16) highest = f_max(draw_load(logits + i, vocab - i), highest);
  const float peak = f_highest(f_div(highest, row.temperature));
  if (!(peak > -__builtin_inff() && peak < __builtin_inff())) return -1;
  row.peak = f_set(peak);
  const bool top_k = rule.top_k > 0 && rule.top_k < vocab, top_p = rule.top_p < 1.0f;
  const bool min_p = rule.min_p > 0.0f;
  double* sums = reinterpret_cast<double*>(scratch + kDrawRoom * 12);
  if (!top_k && !top_p && !min_p) return draw_any(row, rule.uniform, sums);

  double total = 0;
  float threshold = min_p ? peak + __builtin_logf(rule.min_p) : -__builtin_inff();
  float least = threshold;
  if (top_k || (top_p && !min_p)) {
    HrDrawRow wish = rule;
    wish.top_k = top_k ? rule.top_k : 0;
    const float cut = draw_cut(row, wish, top_p, &total);
    if (!(total > 0) || total > 1e30) return -1;
    least = std::max(threshold, peak - cut);
  }
  float* value = reinterpret_cast<float*>(scratch);
  float* order = value + kDrawRoom;
  int32_t* token = reinterpret_cast<int32_t*>(order + kDrawRoom);
  int64_t count = 0;
  const F floor = f_set(least);
  for (int64_t i = 0; i < vocab; i += 16) {
    F x = draw_scaled(row, i);
    uint32_t bits = f_not_below(x, floor);
    if (vocab - i < 16) bits &= (1u << (vocab - i)) - 1;
    if (!bits) continue;
    if (count + 16 > kDrawRoom) return -1;
    float t[16];
    f_store(t, x);
    for (; bits; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      value[count] = t[lane];
      token[count++] = static_cast<int32_t>(i + lane);
    }
  }
  if (!count) return -1;
  if (top_k && count > rule.top_k) {
    std::copy(value, value + count, order);
    std::nth_element(order, order + rule.top_k - 1, order + count, std::greater<float>());
    threshold = std::max(threshold, order[rule.top_k - 1]);
  }
  // Masses in the order of the tokens, in place of their values once the nucleus is known.
  auto masses = [&](const float* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += 16)
      f_store_tail(to + i, f_exp(f_sub(draw_load(from + i, n - i), row.peak)), n - i);
  };
  if (top_p) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i)
      if (value[i] >= threshold) order[kept++] = value[i];
    std::sort(order, order + kept, std::greater<float>());
    double everything = total;
    if (top_k || min_p) {
      everything = 0;
      for (int64_t i = 0; i < kept; i += 16) {
        float t[16];
        f_store(t, f_exp(f_sub(draw_load(order + i, kept - i), row.peak)));
        for (int64_t j = 0; j < 16 && i + j < kept; ++j) everything += static_cast<double>(t[j]);
      }
    }
    const double target = static_cast<double>(rule.top_p) * everything;
    double reached = 0;
    int64_t end = kept;  // the first token with which the target is reached
    for (int64_t i = 0; i < kept && end == kept; i += 16) {
      float t[16];
      f_store(t, f_exp(f_sub(draw_load(order + i, kept - i), row.peak)));
      for (int64_t j = 0; j < 16 && i + j < kept; ++j) {
        reached += static_cast<double>(t[j]);
        if (reached >= target) {
          end = i + j;
          break;
        }
      }
    }
    threshold = std::max(threshold, order[std::min(end, kept - 1)]);
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i)
    if (value[i] >= threshold) {
      value[kept] = value[i];
      token[kept++] = token[i];
    }
  masses(value, order, kept);
  double sum = 0, before = 0;
  for (int64_t i = 0; i < kept; ++i) sum += static_cast<double>(order[i]);
  const double wanted = rule.uniform * sum;
  for (int64_t i = 0; i < kept; ++i) {
    before += static_cast<double>(order[i]);
    if (before > wanted) return token[i];
  }
  return token[kept - 1];
}

void op_draw(const HrDraw& op, const hr::Work& work) {
  for (int64_t r = work.next(); r < op.count; r = work.next())
    op.tokens[r] = draw_row(op.logits + r * op.stride, op.vocab, op.rows[r], work.scratch);
}

// The first of the highest; 0 where there is no number.
int64_t most_likely(const float* logits, int64_t vocab) {
  HrBest best{-__builtin_inff(), INT32_MAX};
  for (int64_t i = 0; i < vocab; i += HR_PANEL) {
    const int64_t left = vocab - i;
    const Target target{reinterpret_cast<float*>(&best), nullptr,
                        static_cast<int>(left < HR_PANEL ? left : HR_PANEL), HR_KEEP,
                        static_cast<int32_t>(i)};
    keep_best(target, draw_load(logits + i, left));
  }
  return best.token == INT32_MAX ? 0 : best.token;
}

HR_INLINE uint64_t splitmix(uint64_t x) {  // Steele 2014
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The step's own draw: numbers of a row are a function of its stream and of where the new token
// will stand, which the step says, so that nothing is to be handed over from step to step.
void op_sample(const HrSample& op, const hr::Work& work) {
  const HrStep& step = *work.step;
  for (int64_t r = work.next(); r < step.r; r = work.next()) {
    const HrRule& rule = op.rules[r];
    const float* logits = op.logits + r * op.stride;
    if (rule.temperature <= 0) {
      op.tokens[r] = most_likely(logits, op.vocab);
      continue;
    }
    const auto place = static_cast<uint64_t>(step.positions[step.sample_rows[r]] + 1);
    const uint64_t bits = splitmix(rule.stream ^ (place + 0x8CB92BA72F3D8DD7ull));
    const HrDrawRow row{rule.temperature, rule.min_p, rule.top_p, rule.top_k,
                        static_cast<double>(bits >> 11) * 0x1p-53};
    op.tokens[r] = draw_row(logits, op.vocab, row, work.scratch);
  }
}

}  // namespace
