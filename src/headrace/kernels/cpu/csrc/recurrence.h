// Layers that keep a state: convolutions over the last inputs, and matrices that tokens change one
// after the other.
//
// Tokens are walked one by one, each column of a matrix by itself, in fp32: where a prompt was cut,
// which rows are beside it and how many threads there are change no bit. A head's matrix [K, V] lies
// in runs of 32 columns, so that a run (16 KB with K = 128) stays in the first level while a block
// of tokens goes over it. A token reads and writes it once: what it adds to the matrix and what the
// next token asks of it are one pass,
//
//   S' = g S + k dᵀ,  d = β (v − g Sᵀk),  out = g Sᵀq + (k · q) d
//
// so that a decode is two passes over a run, the second of which is in cache.
//
// Of drafts nothing goes into the state that is kept. What would have gone, of each draft and head
// k, v, g and β, lies in the tail, and the next step begins with those that were accepted: the same
// operations on the same numbers as if they had come one by one.
#pragma once
#include "activations.h"
#include "rows.h"
#include "records.h"

namespace {

constexpr int64_t kColumnRun = 32;           // columns
constexpr int64_t kTokens = 16;        // of a block
constexpr int64_t kChannels = 256;     // of an item of a convolution

// What a step finds and leaves of one sequence.
struct Stay {
  int64_t first, count;     // its tokens in the step
  int64_t start;            // tokens before these
  int64_t settled, border;  // tokens in the state as the step begins, and as it ends
  int64_t block;
  int64_t at[2], into[2];   // checkpoints

  HR_ALWAYS Stay(const HrStep& step, int group, int64_t entry)
      : first(step.query_starts[entry]), count(step.query_starts[entry + 1] - first),
        start(step.lengths[entry] - count), settled(start), border(start + count),
        block(step.groups[group].tables[entry * step.groups[group].table_stride]), at{0, 0},
        into{0, 0} {
    if (!step.states) return;
    const int32_t* row = step.states + entry * HR_STATE_COLUMNS;
    settled = row[0];
    border = start + row[1];
    for (int i = 0; i < 2; ++i) at[i] = row[2 + 2 * i], into[i] = row[3 + 2 * i];
  }
};

void op_conv(const HrConv& op, const hr::Work& work) {
  const HrStep& step = *work.step;
  const int64_t runs = (op.channels + kChannels - 1) / kChannels, before = op.count - 1;
  int64_t item;
  while ((item = work.next()) < step.b * runs) {
    const Stay stay(step, op.group, item / runs);
    const int64_t from = item % runs * kChannels;
    const int64_t to = from + kChannels < op.channels ? from + kChannels : op.channels;
    float* const ring = op.inputs + stay.block * op.room * op.channels;
    // The input of a position that is not before the sequence.
    const auto input = [&](int64_t position, int64_t c) __attribute__((always_inline)) {
      if (position < stay.start)
        return f_tail(ring + position % op.room * op.channels + c, to - c);
      const float* x = op.x + (stay.first + position - stay.start) * op.x_stride + c;
      if (!op.gated) return f_tail(x, to - c);
      return f_mul(f_tail(x, to - c), f_tail(x + 2 * op.channels, to - c));
    };
    for (int64_t t = 0; t < stay.count; ++t) {
      const int64_t row = stay.first + t;
      for (int64_t c = from; c < to; c += 16) {
        const int64_t left = to - c;
        F sum = op.bias ? f_tail(op.bias + c, left) : f_zero();
        for (int64_t tap = 0; tap <= before; ++tap) {
          const int64_t position = stay.start + t - before + tap;
          if (position >= 0)
            sum = f_fma(f_tail(op.taps + tap * op.channels + c, left), input(position, c), sum);
        }
        if (op.silu) sum = activate<HR_SILU>(sum);
        if (op.gated) sum = f_mul(sum, f_tail(op.x + row * op.x_stride + op.channels + c, left));
        f_store_tail(op.y + row * op.y_stride + c, sum, left);
      }
    }
    // Checkpoints first: they may want inputs of which the places are about to be taken.
    const auto keep = [&](int64_t block, int64_t end, int64_t last) {
      float* const target = op.inputs + block * op.room * op.channels;
      for (int64_t p = end - last > 0 ? end - last : 0; p < end; ++p)
        for (int64_t c = from; c < to; c += 16)
          f_store_tail(target + p % op.room * op.channels + c, input(p, c), to - c);
    };
    for (int i = 0; i < 2; ++i)
      if (stay.at[i]) keep(stay.into[i], stay.at[i], before);
    const int64_t mine = stay.count < op.room ? stay.count : op.room;
    keep(stay.block, stay.start + stay.count, mine);
  }
}

// Numbers of a block of tokens of one head.
struct Block {
  float *k, *q, *v, *out;            // [kTokens, K], [kTokens, V]
  float g[kTokens], beta[kTokens], kq[kTokens];
};

HR_INLINE int64_t block_floats(const HrRecurrence& op) {
  return kTokens * 2 * (op.key_size + op.value_size);
}

int64_t recurrence_scratch(const HrRecurrence& op) {
  return 4 * (block_floats(op) + static_cast<int64_t>(op.key_size) * op.value_size);
}

HR_INLINE F sums_of(const float* x, const float* y, int64_t size) {
  F sum = f_zero();
  for (int64_t i = 0; i < size; i += 16) sum = f_fma(f_load(x + i), f_load(y + i), sum);
  return sum;
}

// x / |x| · factor, of a key or a query.
HR_INLINE void to_unit(const float* x, int64_t size, float factor, float* y) {
  const float length = __builtin_sqrtf(f_sum(sums_of(x, x, size)) + 1e-6f);
  const F by = f_set(factor / length);
  for (int64_t i = 0; i < size; i += 16) f_store(y + i, f_mul(f_load(x + i), by));
}

// The tokens [from, to) of a step, of one head.
HR_INLINE void read_block(const HrRecurrence& op, const Stay& stay, int64_t head, int64_t from,
                          int64_t to, Block& block) {
  const int64_t K = op.key_size, V = op.value_size, keys = op.key_heads * K, values = op.heads * V;
  const int64_t shared = op.tiled ? head % op.key_heads : head / (op.heads / op.key_heads);
  const int64_t own = shared * K, n = to - from;
  const bool delta = op.b != nullptr;
  float a[kTokens] = {0}, b[kTokens] = {0};
  const int64_t row = stay.first + from - stay.start;
  for (int64_t t = 0; t < n; ++t) {
    a[t] = op.a[(row + t) * op.a_stride + head];
    if (delta) b[t] = op.b[(row + t) * op.b_stride + head];
  }
  const F step = f_softplus(f_add(f_load(a), f_set(op.step[head])));
  const F rate = f_exp(f_set(op.decay[head]));
  f_store(block.g, f_exp(f_sub(f_zero(), f_mul(rate, step))));
  if (delta) f_store(block.beta, activate<HR_SIGMOID>(f_load(b)));
  else f_store(block.beta, step);
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(K));
  for (int64_t t = 0; t < n; ++t) {
    const float* m = op.mixed + (row + t) * op.mixed_stride;
    float *k = block.k + t * K, *q = block.q + t * K, *v = block.v + t * V;
    if (delta) {
      to_unit(m + own, K, factor, q);
      to_unit(m + keys + own, K, 1.0f, k);
      memcpy(v, m + 2 * keys + head * V, static_cast<size_t>(V) * 4);
      block.kq[t] = f_sum(sums_of(k, q, K));
    } else {
      memcpy(k, m + values + own, static_cast<size_t>(K) * 4);
      memcpy(q, m + values + keys + own, static_cast<size_t>(K) * 4);
      const F by = f_set(block.beta[t]);
      for (int64_t i = 0; i < V; i += 16) f_store(v + i, f_mul(f_load(m + head * V + i), by));
    }
  }
}

HR_INLINE float* tail_of(const HrRecurrence& op, const Stay& stay, int64_t draft, int64_t head) {
  const int64_t size = op.key_size + op.value_size + 2;
  return op.tail + ((stay.block * op.drafts + draft) * op.heads + head) * size;
}

// W vectors of columns of a head's matrix, over a block of n tokens. What is asked is in q; `ahead`
// is what is read next.
template <int W>
HR_INLINE void delta_run(float* S, int64_t K, int64_t n, const Block& block, int64_t V,
                         int64_t column, const float* ahead) {
  F a[2][W], b[2][W];
  const auto clear = [&]() __attribute__((always_inline)) {
    for (int h = 0; h < 2; ++h)
      for (int w = 0; w < W; ++w) a[h][w] = b[h][w] = f_zero();
  };
  clear();
  for (int64_t i = 0; i < K; i += 2)
    for (int h = 0; h < 2; ++h) {
      const F k = f_set(block.k[i + h]), q = f_set(block.q[i + h]);
      for (int w = 0; w < W; ++w) {
        const F s = f_load(S + (i + h) * 16 * W + 16 * w);
        a[h][w] = f_fma(s, k, a[h][w]);
        b[h][w] = f_fma(s, q, b[h][w]);
      }
    }
  for (int64_t t = 0; t < n; ++t) {
    const F g = f_set(block.g[t]), beta = f_set(block.beta[t]), kq = f_set(block.kq[t]);
    F d[W];
    for (int w = 0; w < W; ++w) {
      const int64_t at = t * V + column + 16 * w;
      d[w] = f_mul(beta, f_fnma(g, f_add(a[0][w], a[1][w]), f_load(block.v + at)));
      f_store(block.out + at, f_fma(kq, d[w], f_mul(g, f_add(b[0][w], b[1][w]))));
    }
    const float* const k = block.k + t * K;
    if (t + 1 == n) {
      for (int64_t i = 0; i < K; ++i) {
        const F by = f_set(k[i]);
        for (int w = 0; w < W; ++w) {
          float* const s = S + i * 16 * W + 16 * w;
          f_store(s, f_fma(by, d[w], f_mul(g, f_load(s))));
          prefetch_l1(ahead + i * 16 * W + 16 * w);
        }
      }
      return;
    }
    clear();
    for (int64_t i = 0; i < K; i += 2)
      for (int h = 0; h < 2; ++h) {
        const F by = f_set(k[i + h]), next = f_set(k[K + i + h]);
        const F q = f_set(block.q[(t + 1) * K + i + h]);
        for (int w = 0; w < W; ++w) {
          float* const s = S + (i + h) * 16 * W + 16 * w;
          const F to = f_fma(by, d[w], f_mul(g, f_load(s)));
          f_store(s, to);
          a[h][w] = f_fma(to, next, a[h][w]);
          b[h][w] = f_fma(to, q, b[h][w]);
        }
      }
  }
}

template <int W>
HR_INLINE void space_run(float* S, int64_t K, int64_t n, const Block& block, int64_t V,
                         int64_t column, const float* ahead) {
  for (int64_t t = 0; t < n; ++t) {
    const F g = f_set(block.g[t]);
    F d[W], sum[2][W];
    for (int w = 0; w < W; ++w) {
      d[w] = f_load(block.v + t * V + column + 16 * w);
      sum[0][w] = sum[1][w] = f_zero();
    }
    const float *const k = block.k + t * K, *const q = block.q + t * K;
    for (int64_t i = 0; i < K; i += 2)
      for (int h = 0; h < 2; ++h) {
        const F by = f_set(k[i + h]), c = f_set(q[i + h]);
        for (int w = 0; w < W; ++w) {
          float* const s = S + (i + h) * 16 * W + 16 * w;
          const F to = f_fma(by, d[w], f_mul(g, f_load(s)));
          f_store(s, to);
          sum[h][w] = f_fma(to, c, sum[h][w]);
          if (t == 0) prefetch_l1(ahead + (i + h) * 16 * W + 16 * w);
        }
      }
    for (int w = 0; w < W; ++w)
      f_store(block.out + t * V + column + 16 * w, f_add(sum[0][w], sum[1][w]));
  }
}

// Norm and gate of the delta rule, skip and gate of a state space: the result of token `row`.
HR_INLINE void end_token(const HrRecurrence& op, int64_t row, int64_t head, const float* out) {
  const int64_t V = op.value_size;
  const float* z = op.z + row * op.z_stride + head * V;
  float* y = op.y + row * op.y_stride + head * V;
  if (op.b) {
    const float mean = f_sum(sums_of(out, out, V)) / static_cast<float>(V);
    const F by = f_set(1.0f / __builtin_sqrtf(mean + op.eps));
    for (int64_t i = 0; i < V; i += 16) {
      const F normed = f_mul(f_mul(f_load(out + i), by), f_load(op.gain + i));
      f_store(y + i, f_mul(normed, activate<HR_SILU>(f_load(z + i))));
    }
    return;
  }
  const F skip = f_set(op.skip[head]);
  const float* x = op.mixed + row * op.mixed_stride + head * V;
  for (int64_t i = 0; i < V; i += 16)
    f_store(y + i, f_mul(f_fma(skip, f_load(x + i), f_load(out + i)),
                         activate<HR_SILU>(f_load(z + i))));
}

HR_INLINE void head_of_entry(const HrRecurrence& op, const Stay& stay, int64_t head, float* room) {
  const int64_t K = op.key_size, V = op.value_size, size = K * V, end = stay.start + stay.count;
  Block block;
  block.k = room;
  block.q = block.k + kTokens * K;
  block.v = block.q + kTokens * K;
  block.out = block.v + kTokens * V;
  float* const spare = room + block_floats(op);
  const auto home = [&](int64_t number) { return op.state + (number * op.heads + head) * size; };
  float* S = home(stay.block);
  if (stay.settled == 0) memset(S, 0, static_cast<size_t>(size) * 4);
  for (int64_t p = stay.settled, stop; p < end; p = stop) {
    stop = p + kTokens < end ? p + kTokens : end;
    for (const int64_t cut : {stay.start, stay.border, stay.at[0], stay.at[1]})
      if (p < cut && cut < stop) stop = cut;
    const int64_t n = stop - p;
    if (p >= stay.start) {
      read_block(op, stay, head, p, stop, block);
    } else {
      for (int64_t t = 0; t < n; ++t) {
        const float* kept = tail_of(op, stay, p + t - stay.settled, head);
        memcpy(block.k + t * K, kept, static_cast<size_t>(K) * 4);
        memcpy(block.q + t * K, kept, static_cast<size_t>(K) * 4);
        memcpy(block.v + t * V, kept + K, static_cast<size_t>(V) * 4);
        block.g[t] = kept[K + V];
        block.beta[t] = kept[K + V + 1];
        block.kq[t] = 0;
      }
    }
    if (p == stay.border) {
      memcpy(spare, S, static_cast<size_t>(size) * 4);
      S = spare;
    }
    for (int64_t column = 0; column < V; column += kColumnRun) {
      float* const run = S + column * K;
      const float* const ahead = column + kColumnRun < V || n > 1 ? run + kColumnRun * K : S + size;
      if (V - column >= kColumnRun) {
        if (op.b) delta_run<2>(run, K, n, block, V, column, ahead);
        else space_run<2>(run, K, n, block, V, column, ahead);
      } else {
        if (op.b) delta_run<1>(run, K, n, block, V, column, ahead);
        else space_run<1>(run, K, n, block, V, column, ahead);
      }
    }
    if (p >= stay.start)
      for (int64_t t = 0; t < n; ++t)
        end_token(op, stay.first + p + t - stay.start, head, block.out + t * V);
    if (p >= stay.border)
      for (int64_t t = 0; t < n; ++t) {
        float* const kept = tail_of(op, stay, p + t - stay.border, head);
        memcpy(kept, block.k + t * K, static_cast<size_t>(K) * 4);
        memcpy(kept + K, block.v + t * V, static_cast<size_t>(V) * 4);
        kept[K + V] = block.g[t];
        kept[K + V + 1] = block.beta[t];
      }
    for (int i = 0; i < 2; ++i)
      if (stay.at[i] == stop && stop > stay.start)
        memcpy(home(stay.into[i]), S, static_cast<size_t>(size) * 4);
  }
}

void op_recurrence(const HrRecurrence& op, const hr::Work& work) {
  const HrStep& step = *work.step;
  int victim = 0;
  int64_t item;
  while (work.next_in_line(step.b * op.heads, &victim, &item))
    head_of_entry(op, Stay(step, op.group, item / op.heads), item % op.heads,
                  reinterpret_cast<float*>(work.scratch));
}

template <int kActivation>
void multiply_range(const HrMultiply& op, int64_t row, int64_t from, int64_t to) {
  const float *x = op.x + row * op.x_stride, *gate = op.gate + row * op.gate_stride;
  float* y = op.y ? op.y + row * op.y_stride : nullptr;
  for (int64_t i = from; i < to; i += 32) {
    F v[2];
    for (int h = 0; h < 2 && i + 16 * h < to; ++h) {
      const int64_t at = i + 16 * h, left = to - at;
      v[h] = f_mul(f_tail(x + at, left), activate<kActivation>(f_tail(gate + at, left)));
      if (y) f_store_tail(y + at, v[h], left);
    }
    if (op.q.six) quantise_at(op.q, row, i / 32, v[0], v[1]);
  }
}

void op_multiply(const HrMultiply& op, const hr::Work& work) {
  constexpr int64_t kColumns = 512;
  const int64_t runs = (op.size + kColumns - 1) / kColumns;
  int64_t first, last;
  work.share(work.rows(op.rows) * runs, &first, &last);
  for (int64_t item = first; item < last; ++item) {
    const int64_t row = item / runs, from = item % runs * kColumns;
    const int64_t to = from + kColumns < op.size ? from + kColumns : op.size;
    switch (op.activation) {
      case HR_SIGMOID: multiply_range<HR_SIGMOID>(op, row, from, to); break;
      case HR_GELU_TANH: multiply_range<HR_GELU_TANH>(op, row, from, to); break;
      case HR_GELU: multiply_range<HR_GELU>(op, row, from, to); break;
      case HR_IDENTITY: multiply_range<HR_IDENTITY>(op, row, from, to); break;
      default: multiply_range<HR_SILU>(op, row, from, to); break;
    }
  }
}

}  // namespace
