// Every operator record at random shapes, strides and values, by each team: the same bits.
//
// What is refused is a touch outside of a row, a table, a page or the work space; numbers are the
// business of the Python tests. The shapes are those that records.h allows and no others.
#pragma once
#include <functional>
#include <memory>

#include "weights.h"

namespace fuzz {

using Bytes = std::vector<uint8_t>;

// What runs, and who is told the bits that it gave: for comparing machines (bits/driver.cpp).
inline const char* g_now = "";
inline std::function<void(const char*, const Bytes&)> g_told;

// Runs the records on every team from the same start; what `read` gives must be the same.
inline void by_all(void* const* teams, int count, const HrRecord* records, int length,
                   const HrStep& step, const std::function<void()>& begin,
                   const std::function<Bytes()>& read) {
  Bytes first;
  for (int t = 0; t < count; ++t) {
    begin();
    CHECK(hr_run(teams[t], records, length, &step, nullptr) == 0);
    if (t == 0) first = read();
    else CHECK(read() == first);
  }
  if (g_told) g_told(g_now, first);
}

inline void add(Bytes* to, const Bytes& more) { to->insert(to->end(), more.begin(), more.end()); }

inline HrStep rows_of(int n, int r) {
  HrStep step{};
  step.n = n;
  step.r = r;
  return step;
}

// So many rows; where they are the sampled ones, of as many tokens or more.
inline HrStep step_of(bool sampled, int rows) {
  return sampled ? rows_of(rows + any(0, 40), rows) : rows_of(rows, 0);
}

// Some of n rows, ascending.
inline std::vector<int64_t> some_of(int n) {
  std::vector<int64_t> some;
  for (int i = 0; i < n; ++i)
    if (any(0, 2) == 0) some.push_back(i);
  return some;
}

inline void embeds(void* const* teams, int count) {
  const Kind& kind = kKinds[any(kInFiles, kAll - 2)];
  const int vocab = any(1, 9), size = kind.span * (kind.span == 1 ? any(1, 70) : any(1, 2));
  const int n = any(0, 12);
  File file(kind, vocab, size);
  Block<int64_t> tokens(n);
  for (int i = 0; i < n; ++i) tokens.data[i] = any(0, vocab - 1);
  Grid y(n, size);
  HrEmbed op{file.data.data, file.row, y.block.data, y.stride, 0.5f, kind.kind, vocab, size,
             HR_TOKENS, 0};
  HrRecord record{HR_OP_EMBED, 0, &op};
  HrStep step = rows_of(n, 0);
  step.tokens = tokens.data;
  by_all(teams, count, &record, 1, step, [&] { y.fill(true); }, [&] { return y.bytes(); });
}

inline void norms(void* const* teams, int count) {
  const bool coded = any(0, 1), sampled = any(0, 1), summed = any(0, 1);
  const int width = coded ? 32 * any(1, 5) : any(1, 100), rows = any(0, 9);
  Grid x(rows, width), residual(rows, width), y(rows, width);
  Block<float> weight(width);
  Codes codes(rows, width / 32 * 32, any(0, 3));
  x.fill(true);
  residual.fill(true);
  for (int i = 0; i < width; ++i) weight.data[i] = any_float();
  const Bytes before = residual.bytes();
  HrNorm op{x.block.data, x.stride, summed ? residual.block.data : nullptr, residual.stride,
            weight.data, !coded || any(0, 1) ? y.block.data : nullptr, y.stride,
            coded ? codes.q : HrQuantised{nullptr, 0}, 1e-6f, 1.0f, width,
            sampled ? HR_ROWS_R : HR_ROWS_N};
  HrRecord record{HR_OP_NORM, 0, &op};
  const HrStep step = step_of(sampled, rows);
  by_all(teams, count, &record, 1, step, [&] { residual.put(before); },
         [&] {
           Bytes all = y.bytes();
           add(&all, residual.bytes());
           add(&all, codes.bytes());
           return all;
         });
}

inline void rows_ops(void* const* teams, int count) {
  const int width = any(0, 3) ? any(1, 100) : any(4090, 4200), rows = any(1, 9), n = any(1, 9);
  const bool sampled = any(0, 1);
  Grid x(n, width), y(rows, width);
  Block<int64_t> chosen(rows);
  for (int i = 0; i < rows; ++i) chosen.data[i] = any(0, n - 1);
  x.fill(true);
  y.fill(true);
  const Bytes before = y.bytes();
  HrRowsOp select{x.block.data, x.stride, y.block.data, y.stride, width, HR_ROWS_R, 0, 0};
  HrRowsOp cap{nullptr, 0, y.block.data, y.stride, width, HR_ROWS_R, 5.0f, 0};
  HrRecord records[] = {{HR_OP_SELECT, 0, &select}, {HR_OP_SOFTCAP, 0, &cap}};
  HrStep step = rows_of(n, rows);
  step.sample_rows = chosen.data;
  const auto begin = [&] { y.put(before); };
  const auto read = [&] { return y.bytes(); };
  by_all(teams, count, records, 2, step, begin, read);
  const int both = n < rows ? n : rows;
  HrRowsOp sum{x.block.data, x.stride, y.block.data, y.stride, width,
               sampled ? HR_ROWS_R : HR_ROWS_N, 0, 0};
  HrRecord record{HR_OP_ADD, 0, &sum};
  by_all(teams, count, &record, 1, step_of(sampled, both), begin, read);
}

inline void gates(void* const* teams, int count) {
  const bool coded = any(0, 1), sampled = any(0, 1);
  const int size = coded ? 32 * any(1, 20) : any(1, 600), rows = any(0, 9);
  Grid x(rows, 2 * size), y(rows, size);
  Codes codes(rows, size / 32 * 32, any(0, 2));
  x.fill(true);
  HrGated op{x.block.data, x.stride, !coded || any(0, 1) ? y.block.data : nullptr, y.stride,
             coded ? codes.q : HrQuantised{nullptr, 0}, size, any(0, 2),
             sampled ? HR_ROWS_R : HR_ROWS_N, 0};
  HrRecord record{HR_OP_GATED, 0, &op};
  const HrStep step = step_of(sampled, rows);
  by_all(teams, count, &record, 1, step, [] {},
         [&] {
           Bytes all = y.bytes();
           add(&all, codes.bytes());
           return all;
         });
}

// Parts of different kinds side by side, onto what is there or not, with a bias or not.
inline void linears(void* const* teams, int count) {
  const bool dense = any(0, 3) == 0, sampled = any(0, 1);
  const int in = dense ? any(1, 90) : 256 * any(1, 2), rows = any(0, 30), parts = any(1, 3);
  std::unique_ptr<Weight> weights[3];
  int wide = 0;
  for (int i = 0; i < parts; ++i) {
    const Kind& kind = kKinds[dense ? any(kQuantised, kAll - 1) : any(0, kPlanes)];
    weights[i] = std::make_unique<Weight>(teams[0], kind, any(1, 150), in);
    wide += weights[i]->out;
  }
  Grid x(rows, in), y(rows, wide);
  Block<float> bias(wide);
  Codes codes(rows, in / 32 * 32, any(0, 2));
  x.fill(true);
  y.fill(true);
  for (int i = 0; i < wide; ++i) bias.data[i] = random_float();
  const Bytes before = y.bytes();
  HrPart list[3];
  for (int i = 0, first = 0; i < parts; first += weights[i++]->out) {
    const bool biased = any(0, 1), summed = any(0, 1);  // arguments have no order of their own
    list[i] = weights[i]->part(y.block.data + first, y.stride,
                               biased ? bias.data + first : nullptr, summed);
  }
  const int32_t which = sampled ? HR_ROWS_R : HR_ROWS_N;
  HrQuantise quantise{x.block.data, x.stride, codes.q, nullptr, in, which};
  HrLinear linear{codes.q, x.block.data, x.stride, list, parts, which};
  HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise}, {HR_OP_LINEAR, 0, &linear}};
  const HrStep step = step_of(sampled, rows);
  by_all(teams, count, records + dense, 2 - dense, step, [&] { y.put(before); },
         [&] { return y.bytes(); });
}

inline void gate_ups(void* const* teams, int count) {
  const int in = 256 * any(1, 2), out = 32 * any(1, 6), rows = any(0, 30);
  const bool sampled = any(0, 1);
  const int32_t which = sampled ? HR_ROWS_R : HR_ROWS_N;
  Weight gate(teams[0], kKinds[any(0, kQuantised - 1)], out, in);
  Weight up(teams[0], kKinds[any(0, kQuantised - 1)], out, in);
  Grid x(rows, in);
  Codes codes(rows, in, any(0, 2)), inner(rows, out, any(0, 2));
  x.fill(true);
  HrQuantise quantise{x.block.data, x.stride, codes.q, nullptr, in, which};
  HrGateUp op{codes.q, gate.part(nullptr, 0, nullptr, false), up.part(nullptr, 0, nullptr, false),
              inner.q, any(0, 2), which};
  HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise}, {HR_OP_GATE_UP, 0, &op}};
  const HrStep step = step_of(sampled, rows);
  by_all(teams, count, records, 2, step, [] {}, [&] { return inner.bytes(); });
}

// The best output of each row: the teams have one to `count` threads, each with its own best.
inline void heads(void* const* teams, int count) {
  const bool dense = any(0, 3) == 0, sampled = any(0, 1);
  const bool planes = !dense && any(0, 1);
  const Kind& kind = kKinds[dense    ? any(kQuantised, kAll - 1)
                            : planes ? kPlanes
                                     : any(0, kQuantised - 1)];
  const int in = dense ? any(1, 90) : planes ? 32 * any(1, 9) : 256;
  const int rows = any(0, planes ? 5 : 30), stride = rows + any(0, 3);
  Weight weight(teams[0], kind, any(1, 150), in);
  Grid x(rows, in);
  Codes codes(rows, in / 32 * 32, any(0, 2));
  x.fill(true);
  Block<HrBest> best(rows ? static_cast<int64_t>(count - 1) * stride + rows : 0);
  Block<int64_t> tokens(rows);
  const int32_t which = sampled ? HR_ROWS_R : HR_ROWS_N;
  HrPart part = weight.part(nullptr, 0, nullptr, false);
  HrQuantise quantise{x.block.data, x.stride, codes.q, nullptr, in, which};
  HrLinear linear{codes.q, x.block.data, x.stride, &part, 1, which};
  const int bounded = planes ? any(0, HR_BOUNDED) : 0;
  Block<float> bounds(static_cast<int64_t>(bounded) * ((weight.out + 15) / 16));
  Block<float> lower(static_cast<int64_t>(best.bytes / sizeof(HrBest)));
  Block<HrWorth> worth(count);
  const int skip = any(0, 2) ? 0 : any(1, 3);
  HrHead op{linear,     best.data,  stride,  tokens.data, bounds.data, lower.data,
            worth.data, bounded,    nullptr, 0,           nullptr,     1,
            0};
  HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise},
                        {HR_OP_BOUND, 0, &op},
                        {HR_OP_BEST, 0, &op},
                        {HR_OP_PICK, 0, &op}};
  const HrStep step = step_of(sampled, rows);
  const auto begin = [&] {
    memset(worth.data, 0, worth.bytes);
    worth.data[0].skip = skip;
  };
  by_all(teams, count, records + dense, 4 - dense, step, begin, [&] {
    for (int r = 0; r < rows; ++r) CHECK(tokens.data[r] >= 0 && tokens.data[r] < weight.out);
    const auto* at = reinterpret_cast<const uint8_t*>(tokens.data);
    return Bytes(at, at + tokens.bytes);
  });
}

inline void loras(void* const* teams, int count) {
  const int n = any(0, 14), in = any(1, 70), parts = any(1, 3), room = any(1, 9), slots = any(1, 3);
  Block<float> down(static_cast<int64_t>(slots) * parts * room * in);
  for (size_t i = 0; i < down.bytes / 4; ++i) down.data[i] = random_float();
  std::unique_ptr<Block<float>> ups[3];
  HrLoraPart list[3];
  int wide = 0;
  for (int p = 0; p < parts; ++p) {
    const int out = any(0, 2) ? any(1, 60) : any(250, 300);
    ups[p] = std::make_unique<Block<float>>(static_cast<int64_t>(slots) * room * out);
    list[p] = {ups[p]->data, out, wide};
    wide += out;
  }
  Block<int32_t> ranks(slots), adapters(n);
  for (int s = 0; s < slots; ++s) ranks.data[s] = any(0, room);
  for (int i = 0; i < n; ++i)
    adapters.data[i] = i && any(0, 2) ? adapters.data[i - 1] : any(-1, slots - 1);
  const bool sampled = any(0, 1);
  const std::vector<int64_t> picked = some_of(sampled ? n : 0);
  const int rows = sampled ? static_cast<int>(picked.size()) : n;
  Grid x(rows, in), inner(rows, parts * room), y(rows, wide);
  x.fill(true);
  y.fill(true);
  const Bytes before = y.bytes();
  HrLora op{x.block.data, x.stride, inner.block.data, inner.stride, y.block.data, y.stride,
            down.data, ranks.data, list, parts, room, in, sampled ? HR_ROWS_R : HR_ROWS_N, 0};
  HrRecord records[] = {{HR_OP_LORA_DOWN, 0, &op}, {HR_OP_LORA_UP, 0, &op}};
  HrStep step = rows_of(n, static_cast<int>(picked.size()));
  step.sample_rows = picked.data();
  step.adapters = any(0, 5) ? adapters.data : nullptr;
  by_all(teams, count, records, 2, step, [&] { y.put(before); }, [&] { return y.bytes(); });
}

inline void draws(void* const* teams, int count) {
  const int rows = any(0, 6), vocab = any(0, 3) ? any(1, 700) : any(40000, 41000);
  Grid logits(rows, vocab);
  Block<HrDrawRow> rules(rows);
  Block<int64_t> tokens(rows);
  logits.fill(any(0, 3) == 0);
  for (int r = 0; r < rows; ++r)
    rules.data[r] = {0.1f + static_cast<float>(any(0, 20)) / 10, any(0, 2) ? 0.0f : 0.2f,
                     any(0, 1) ? 1.0f : 0.6f, any(0, 1) ? 0 : any(1, vocab + 5),
                     static_cast<double>(any(0, 999)) / 1000};
  HrDraw op{logits.block.data, logits.stride, rules.data, tokens.data, vocab, rows};
  HrRecord record{HR_OP_DRAW, 0, &op};
  by_all(teams, count, &record, 1, rows_of(0, 0), [] {}, [&] {
    for (int r = 0; r < rows; ++r) CHECK(tokens.data[r] >= -1 && tokens.data[r] < vocab);
    const auto* at = reinterpret_cast<const uint8_t*>(tokens.data);
    return Bytes(at, at + tokens.bytes);
  });
  // The same as the end of a step: rows that draw and rows that take the highest, by their places.
  Block<HrRule> streams(rows);
  Block<int64_t> positions(rows), sampled(rows);
  for (int r = 0; r < rows; ++r) {
    const HrDrawRow& rule = rules.data[r];
    streams.data[r] = {any(0, 2) ? rule.temperature : 0.0f, rule.min_p, rule.top_p, rule.top_k,
                       random64()};
    positions.data[r] = any(0, 100000);
    sampled.data[r] = rows - 1 - r;
  }
  HrSample sample{logits.block.data, logits.stride, streams.data, tokens.data, vocab};
  HrRecord end{HR_OP_SAMPLE, 0, &sample};
  HrStep step = rows_of(rows, rows);
  step.positions = positions.data;
  step.sample_rows = sampled.data;
  by_all(teams, count, &end, 1, step, [] {}, [&] {
    for (int r = 0; r < rows; ++r) CHECK(tokens.data[r] >= -1 && tokens.data[r] < vocab);
    const auto* at = reinterpret_cast<const uint8_t*>(tokens.data);
    return Bytes(at, at + tokens.bytes);
  });
}

// Several sequences over scattered pages: KV is written by rope and read by attention.
inline void attentions(void* const* teams, int count) {
  // Parts of a context are joined in another place of the code than whole items are: a row that is
  // no number is none either way, but in which order the compiler adds two NaNs decides the sign.
  const OneNan loosely;
  constexpr int kKv[] = {HR_F32, HR_F16, HR_BF16, HR_I8, HR_K8V4};
  const int kind = kKv[any(0, 4)], block = 8 * any(1, 5), kv_heads = any(1, 3);
  const int heads = kv_heads * (any(0, 3) ? any(1, 9) : 14), size = 16 * any(1, 5);
  // Some steps have entries whose tables begin with the same blocks, most of those single tokens.
  const int prefix = any(0, 1) ? any(1, 150) / block * block : 0;
  const int entries = any(1, prefix ? 9 : 4), window = any(0, 1) ? 0 : any(1, 90) * any(1, 7);
  // And some reach over spans of 512 positions, which several threads share.
  const int far = any(0, 3) ? 150 : any(500, 1700);
  std::vector<int64_t> positions, reach, slots;
  std::vector<int32_t> starts{0}, lengths;
  int wide = 1, blocks = 1;
  for (int b = 0; b < entries; ++b) {
    const int before = prefix ? any(prefix, far) : any(0, 1) ? any(0, far) : 0;
    const int own = any(1, any(0, 2) ? 3 : 40);
    // In some entries the tokens of a run see each other.
    const bool mutual = any(0, 2) == 0;
    for (int i = 0, run = 1; i < own; ++i) {
      positions.push_back(before + i);
      if (i == 0 || i == run) run = i + (mutual ? any(1, own - i) : 1);
      reach.push_back(before + run - 1);
    }
    starts.push_back(static_cast<int32_t>(positions.size()));
    lengths.push_back(before + own);
    blocks += (before + own + block - 1) / block;
    if ((before + own + block - 1) / block > wide) wide = (before + own + block - 1) / block;
  }
  const int n = static_cast<int>(positions.size());
  const int apart = wide + any(0, 3);
  Block<int32_t> tables(static_cast<int64_t>(entries - 1) * apart + wide);
  for (int b = 0, page = blocks - 1; b < entries; ++b) {  // the last one first: a page of the end
    const int have = (lengths[static_cast<size_t>(b)] + block - 1) / block;
    for (int i = 0; i < have; ++i)
      tables.data[b * apart + i] = b && i < prefix / block && any(0, 40) ? tables.data[i] : page--;
    for (int t = starts[static_cast<size_t>(b)]; t < starts[static_cast<size_t>(b) + 1]; ++t) {
      const int64_t p = positions[static_cast<size_t>(t)];
      slots.push_back(static_cast<int64_t>(tables.data[b * apart + p / block]) * block + p % block);
    }
  }
  const int64_t values = static_cast<int64_t>(blocks) * kv_heads * block * size;
  const bool in_codes = kind == HR_I8 || kind == HR_K8V4;
  const int64_t scales = in_codes ? static_cast<int64_t>(blocks) * kv_heads * block : 0;
  const int each = kind == HR_F32 ? 4 : in_codes ? 1 : 2;
  Block<uint8_t> k(values * each), v(values * each / (kind == HR_K8V4 ? 2 : 1));
  Block<uint16_t> k_scale(scales), v_scale(scales);
  Block<float> q_norm(size), k_norm(size), sinks(heads);
  const int angles = (far + 40) * size / 2;
  Block<float> cos(angles), sin(angles);
  for (int i = 0; i < angles; ++i) cos.data[i] = random_float(), sin.data[i] = random_float();
  for (int i = 0; i < size; ++i) q_norm.data[i] = any_float(), k_norm.data[i] = random_float();
  for (int i = 0; i < heads; ++i) sinks.data[i] = any_float();
  const bool normed = any(0, 1), coded = size % 32 == 0 && any(0, 1);
  const bool sampled = any(0, 1);
  const std::vector<int64_t> picked = some_of(sampled ? n : 0);
  const int rows = sampled ? static_cast<int>(picked.size()) : n;
  Grid qkv(n, (heads + 2 * kv_heads) * size), y(rows, heads * size);
  Codes codes(rows, heads * size / 32 * 32, any(0, 2));
  qkv.fill(any(0, 1));
  const Bytes before = qkv.bytes();
  const bool biased = in_codes && any(0, 1), pairs = any(0, 1);
  const int turned = biased ? 2 * any(0, size / 2) : 0;
  Block<float> bias(biased ? kv_heads * size : 0), turns(biased ? 2 * size * 64 : 0);
  for (int i = 0; i < bias.bytes / 4; ++i) bias.data[i] = any(0, 3) ? 0 : random_float();
  for (int i = 0; i < turns.bytes / 4; ++i) turns.data[i] = random_float();
  const HrKv kv{k.data, v.data, scales ? k_scale.data : nullptr, scales ? v_scale.data : nullptr,
                kind, block, heads, kv_heads, size, 0, biased ? bias.data : nullptr, cos.data,
                sin.data, biased ? turns.data : nullptr, turned, pairs};
  HrRope rope{kv, qkv.block.data, qkv.stride, normed ? q_norm.data : nullptr,
              normed ? k_norm.data : nullptr, cos.data, sin.data, nullptr, 1e-6f, 1.0f};
  HrAttention op{kv, qkv.block.data, qkv.stride, !coded || any(0, 1) ? y.block.data : nullptr,
                 y.stride, coded ? codes.q : HrQuantised{nullptr, 0},
                 any(0, 1) ? sinks.data : nullptr, 0.2f, any(0, 2) ? 0 : 5.0f,
                 sampled ? HR_ROWS_R : HR_ROWS_N, 0};
  HrRecord records[] = {{HR_OP_ROPE, 0, &rope}, {HR_OP_ATTENTION, 0, &op}};
  HrStep step = rows_of(n, static_cast<int>(picked.size()));
  step.sample_rows = picked.data();
  step.b = entries;
  step.positions = positions.data();
  step.reach = reach.data();
  step.query_starts = starts.data();
  step.lengths = lengths.data();
  step.group_count = 1;
  step.groups[0] = {tables.data, slots.data(), apart, window};
  by_all(teams, count, records, 2, step, [&] { qkv.put(before); },
         [&] {
           Bytes all = y.bytes();
           add(&all, qkv.bytes());
           add(&all, codes.bytes());
           for (Block<uint8_t>* page : {&k, &v}) {
             if (kind == HR_F32) one_nan<uint32_t>(page->data, page->bytes / 4, 0x7f800000);
             if (kind == HR_F16) one_nan<uint16_t>(page->data, page->bytes / 2, 0x7c00);
             if (kind == HR_BF16) one_nan<uint16_t>(page->data, page->bytes / 2, 0x7f80);
             add(&all, Bytes(page->data, page->data + page->bytes));
           }
           for (Block<uint16_t>* scale : {&k_scale, &v_scale}) {
             one_nan<uint16_t>(scale->data, scale->bytes / 2, 0x7f80);
             const auto* at = reinterpret_cast<const uint8_t*>(scale->data);
             add(&all, Bytes(at, at + scale->bytes));
           }
           return all;
         });
}

// Layer norm, plain and of a sum, in fp32 and as codes.
inline void layer_norms(void* const* teams, int count) {
  const bool coded = any(0, 1), sampled = any(0, 1), summed = any(0, 1);
  const int width = coded ? 32 * any(1, 20) : any(1, 100), rows = any(0, 9);
  Grid x(rows, width), residual(rows, width), y(rows, width);
  Block<float> weight(width), bias(width);
  Codes codes(rows, width / 32 * 32, any(0, 3));
  x.fill(true);
  residual.fill(true);
  for (int i = 0; i < width; ++i) weight.data[i] = any_float(), bias.data[i] = random_float();
  const Bytes before = residual.bytes();
  HrLayerNorm op{x.block.data, x.stride, summed ? residual.block.data : nullptr, residual.stride,
                 weight.data, bias.data, !coded || any(0, 1) ? y.block.data : nullptr, y.stride,
                 coded ? codes.q : HrQuantised{nullptr, 0}, 1e-12f, width,
                 sampled ? HR_ROWS_R : HR_ROWS_N, 0};
  HrRecord record{HR_OP_LAYER_NORM, 0, &op};
  by_all(teams, count, &record, 1, step_of(sampled, rows), [&] { residual.put(before); },
         [&] {
           Bytes all = y.bytes();
           add(&all, residual.bytes());
           add(&all, codes.bytes());
           return all;
         });
}

// An activation by itself, and at the end of a product of parts of several kinds.
inline void activations(void* const* teams, int count) {
  const bool coded = any(0, 1);
  const int size = coded ? 32 * any(1, 20) : any(1, 600), rows = any(0, 30);
  Grid x(rows, size), y(rows, size);
  Codes codes(rows, size / 32 * 32, any(0, 2));
  x.fill(true);
  HrGated op{x.block.data, x.stride, !coded || any(0, 1) ? y.block.data : nullptr, y.stride,
             coded ? codes.q : HrQuantised{nullptr, 0}, size, any(0, 3), HR_ROWS_N, 0};
  HrRecord record{HR_OP_ACTIVATE, 0, &op};
  const HrStep step = rows_of(rows, 0);
  by_all(teams, count, &record, 1, step, [] {},
         [&] {
           Bytes all = y.bytes();
           add(&all, codes.bytes());
           return all;
         });
  const Kind& kind = kKinds[any(kQuantised, kAll - 1)];  // arguments have no order of their own
  Weight weight(teams[0], kind, any(1, 150), size);
  Grid product(rows, weight.out);
  Block<float> bias(weight.out);
  for (int i = 0; i < weight.out; ++i) bias.data[i] = random_float();
  HrPart part = weight.part(product.block.data, product.stride, any(0, 1) ? bias.data : nullptr,
                            false);
  part.accumulate = HR_ACTIVATED + any(0, 3);
  HrLinear linear{HrQuantised{nullptr, 0}, x.block.data, x.stride, &part, 1, HR_ROWS_N};
  HrRecord last{HR_OP_LINEAR, 0, &linear};
  by_all(teams, count, &last, 1, step, [] {}, [&] { return product.bytes(); });
}

// Entries of some tokens each: tables by position and type, then attention to both sides.
inline void encoders(void* const* teams, int count) {
  const int heads = any(1, 4), size = any(0, 1) ? 16 * any(1, 4) : any(1, 70);
  const int entries = any(1, 6), width = 3 * heads * size;
  std::vector<int32_t> starts{0};
  for (int b = 0; b < entries; ++b)
    starts.push_back(starts.back() + (any(0, 3) ? any(0, 40) : any(0, 400)));
  const int n = starts.back(), rows = any(1, 9);
  Block<int64_t> positions(n), types(n);
  for (int i = 0; i < n; ++i) positions.data[i] = any(0, rows - 1), types.data[i] = any(0, 1);
  const Kind& kind = kKinds[any(kQuantised, kAll - 2)];
  File places(kind, rows, width), kinds(kind, 2, width);
  Grid qkv(n, width), of_type(n, width), y(n, heads * size);
  HrEmbed by_place{places.data.data, places.row, qkv.block.data, qkv.stride, 1.0f, kind.kind, rows,
                   width, HR_POSITIONS, 0};
  HrEmbed by_type{kinds.data.data, kinds.row, of_type.block.data, of_type.stride, 1.0f, kind.kind,
                  2, width, HR_TYPES, 0};
  HrRowsOp sum{of_type.block.data, of_type.stride, qkv.block.data, qkv.stride, width, HR_ROWS_N,
               0, 0};
  HrBidirectional op{qkv.block.data, qkv.stride, y.block.data, y.stride, 0.2f, heads, size, 0};
  HrRecord records[] = {{HR_OP_EMBED, 0, &by_place},
                        {HR_OP_EMBED, 0, &by_type},
                        {HR_OP_ADD, 0, &sum},
                        {HR_OP_BIDIRECTIONAL, 0, &op}};
  HrStep step = rows_of(n, 0);
  step.b = entries;
  step.positions = positions.data;
  step.types = types.data;
  step.query_starts = starts.data();
  by_all(teams, count, records, 4, step, [] {}, [&] {
    Bytes all = y.bytes();
    add(&all, qkv.bytes());
    return all;
  });
}

// Numbers into blocks of fewer bits, and groups of them into scales; one in ten has none.
inline void encodings(void* const* teams, int count) {
  const int kinds[] = {3, 5, 7, 8, 10};  // Q4_0, Q5_0, Q8_0, Q4_K, Q6_K
  const Kind &kind = kKinds[kinds[any(0, 4)]], &type = kKinds[any(kQuantised, kQuantised + 2)];
  const int blocks = any(1, 40), width = kind.span * blocks, size = 16 << any(0, 3);
  File file(type, 1, width);
  Block<float> numbers(blocks * size);
  for (int i = 0; i < blocks * size; ++i) numbers.data[i] = random_float();
  const bool known = any(0, 9);
  if (!known) {
    memset(file.data.data, 255, type.bytes);
    numbers.data[any(0, blocks * size - 1)] = any(0, 1) ? __builtin_nanf("") : 6e4f + 1;
  }
  Bytes first;
  for (int t = 0; t < count; ++t) {
    Block<uint8_t> made(blocks * kind.bytes);
    Block<float> scales(blocks);
    CHECK(hr_encode(teams[t], kind.kind, type.kind, file.data.data, width, made.data) == !known);
    CHECK(hr_symmetric(teams[t], numbers.data, blocks * size, size, 8, scales.data) == !known);
    if (!known) continue;
    Bytes all(made.data, made.data + made.bytes);
    const auto* found = reinterpret_cast<const uint8_t*>(scales.data);
    all.insert(all.end(), found, found + scales.bytes);
    if (t == 0) first = all;
    else CHECK(all == first);
  }
  if (g_told) g_told(g_now, first);
}

inline void everything(void* const* teams, int count, int rounds) {
  for (int i = 0; i < rounds; ++i) {
#define HR_FUZZ(name) g_now = #name, name(teams, count);
    HR_FUZZ(embeds) HR_FUZZ(norms) HR_FUZZ(rows_ops) HR_FUZZ(gates) HR_FUZZ(linears)
    HR_FUZZ(gate_ups) HR_FUZZ(heads) HR_FUZZ(loras) HR_FUZZ(draws) HR_FUZZ(attentions)
  }
  for (int i = 0; i < rounds; ++i) {  // behind the others, whose digests stay what they were
    HR_FUZZ(layer_norms) HR_FUZZ(activations) HR_FUZZ(encoders)
  }
  for (int i = 0; i < rounds; ++i) {
    HR_FUZZ(encodings)
  }
#undef HR_FUZZ
}

}  // namespace fuzz
