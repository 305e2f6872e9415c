// From dense weights to blocks of GGUF: what `--quantise` and the factory make.
//
// The scale of a group is the one of nine candidates whose error, weighted by |w| + rms, is least:
// the largest weight is tried at some tenths of a code beside the last one, and given its codes the
// best scale is a quotient of sums. Formats with minima fit a line instead. All of it is fp32, and a
// sum over a group has eight partial sums, of every eighth number, added in pairs: the order in
// which numpy sums, so that the tests compare bits (tests/oracle/encoders.py).
//
// Eight groups go together: their sums come out as one vector, a lane for each, and what follows of
// them is computed for all eight at once. Vectors are the compiler's, eight lanes on every processor;
// on x86-64 this file is compiled for AVX2, without which the library does not serve.
#include <math.h>
#include <string.h>

#include "half.h"
#include "layout.h"
#include "library.h"
#include "pack.h"
#include "team.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hr {
namespace {

constexpr int kGroups = 8;
constexpr int kPiece = 256;  // numbers that are encoded at a time
typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t Mask __attribute__((vector_size(32)));
constexpr float kLargest = 60000;  // a scale of it is still a half

HR_ALWAYS Lanes load(const float* p) {
  Lanes x;
  memcpy(&x, p, sizeof(x));
  return x;
}
HR_ALWAYS void store(float* p, const Lanes& x) { memcpy(p, &x, sizeof(x)); }
HR_ALWAYS Lanes all(float x) { return Lanes{} + x; }
HR_ALWAYS Lanes size_of(const Lanes& x) { return x < 0 ? -x : x; }
HR_ALWAYS Lanes larger(const Lanes& x, const Lanes& y) { return x > y ? x : y; }

// The nearest whole number from `low` to `high`, of two the even one; a NaN stays one. Beyond 2^23 a
// float has no fraction, so that adding this number rounds.
HR_ALWAYS Lanes nearest_code(Lanes x, float low, float high) {
  x = x < low ? all(low) : x;
  x = x > high ? all(high) : x;
  return (x + 12582912.0f) - 12582912.0f;
}

// Lane g: the sum of the eight lanes of part g, in pairs.
HR_ALWAYS Lanes in_pairs(const Lanes* part) {
#if defined(__AVX2__)
  const auto pair = [&](int g) { return _mm256_hadd_ps((__m256)part[g], (__m256)part[g + 1]); };
  const __m256 low = _mm256_hadd_ps(pair(0), pair(2)), high = _mm256_hadd_ps(pair(4), pair(6));
  return (Lanes)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                              _mm256_permute2f128_ps(low, high, 0x31));
#else
  Lanes sum;
  for (int g = 0; g < kGroups; ++g) {
    const Lanes& p = part[g];
    sum[g] = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
  }
  return sum;
#endif
}

// Eight groups of kSize numbers with what a candidate does not change.
template <int kSize>
struct Groups {
  const float* x;
  float weights[kGroups * kSize];

  // visit(at) for every eight numbers, at their place.
  template <class Visit>
  HR_ALWAYS static void each(int g, Visit visit) {
    for (int i = 0; i < kSize; i += 8) visit(g * kSize + i);
  }

  // The least and the largest number of each group.
  HR_ALWAYS void ends(Lanes* least, Lanes* largest) const {
    for (int g = 0; g < kGroups; ++g) {
      Lanes low = load(x + g * kSize), high = low;
      each(g, [&](int at) {
        const Lanes here = load(x + at);
        low = here < low ? here : low;
        high = larger(here, high);
      });
      for (int i = 1; i < 8; ++i) {
        low[0] = low[i] < low[0] ? low[i] : low[0];
        high[0] = high[i] > high[0] ? high[i] : high[0];
      }
      (*least)[g] = low[0];
      (*largest)[g] = high[0];
    }
  }

  // Sums over each group of what `term` gives at a place.
  template <class Term>
  HR_ALWAYS static Lanes sum(Term term) {
    Lanes part[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      part[g] = term(g * kSize);
      for (int i = 8; i < kSize; i += 8) part[g] += term(g * kSize + i);
    }
    return in_pairs(part);
  }

  HR_ALWAYS explicit Groups(const float* numbers) : x(numbers) {
    const Lanes squares = sum([&](int at) { return load(x + at) * load(x + at); });
    float rms[kGroups];
    for (int g = 0; g < kGroups; ++g) rms[g] = sqrtf(squares[g] / kSize);
    for (int g = 0; g < kGroups; ++g)
      each(g, [&](int at) { store(weights + at, size_of(load(x + at)) + rms[g]); });
  }
};

// Candidates: tenths of a code beside `code`.
template <class Try>
HR_ALWAYS void candidates(double code, Try attempt) {
  for (int step = -8; step <= 8; step += 2) attempt(static_cast<float>(code + 0.1 * step));
}

HR_ALWAYS Lanes quotient(float above, const Lanes& below, const Mask& where) {
  const Lanes found = above / below;
  return where ? found : all(0);
}

// Scales of eight groups: the number of largest size takes the code -half.
template <int kSize>
HR_ALWAYS Lanes symmetric(const float* x, int half) {
  const Groups<kSize> groups(x);
  Lanes low_end, top;
  groups.ends(&low_end, &top);
  for (int g = 0; g < kGroups; ++g) {
    if (-low_end[g] > top[g]) top[g] = low_end[g];
    const float* one = x + g * kSize;
    if (-low_end[g] == top[g]) {  // the first of both
      while (fabsf(*one) != top[g]) ++one;
      top[g] = *one;
    }
  }
  const float low = static_cast<float>(-half), high = static_cast<float>(half - 1);
  Lanes best = all(-1), scale = all(0);
  candidates(half, [&](float code) {
    const Lanes inverse = quotient(-code, top, top != 0);
    Lanes along[kGroups], across[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      along[g] = across[g] = all(0);
      groups.each(g, [&](int at) {
        const Lanes here = load(x + at), codes = nearest_code(here * inverse[g], low, high);
        const Lanes weighted = load(groups.weights + at) * codes;
        along[g] += weighted * here;
        across[g] += weighted * codes;
      });
    }
    const Lanes sum = in_pairs(along), squares = in_pairs(across);
    const Lanes found = squares > 0 ? sum / squares : all(0);
    const Mask better = sum * found > best;
    best = better ? sum * found : best;
    scale = better ? found : scale;
  });
  return scale;
}

struct Line {
  Lanes scale, least;  // w = scale · code - least
};

template <int kSize>
HR_ALWAYS Line affine(const float* x, int last) {
  const Groups<kSize> groups(x);
  Lanes low, high;
  groups.ends(&low, &high);
  low = low < 0 ? low : all(0);
  const Lanes span = larger(high - low, all(0));
  const float* weights = groups.weights;
  const Lanes total = groups.sum([&](int at) { return load(weights + at); });
  const Lanes linear = groups.sum([&](int at) { return load(weights + at) * load(x + at); });
  const float top = static_cast<float>(last);
  Lanes best = all(INFINITY);
  Line line{all(0), -low};
  candidates(last, [&](float code) {
    const Lanes inverse = quotient(code, span, span > 0);
    float kept[kGroups * kSize];
    Lanes ones[kGroups], twos[kGroups], alongs[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      ones[g] = twos[g] = alongs[g] = all(0);
      groups.each(g, [&](int at) {
        const Lanes here = load(x + at);
        const Lanes codes = nearest_code((here - low[g]) * inverse[g], 0, top);
        const Lanes weighted = load(weights + at) * codes;
        store(kept + at, codes);
        ones[g] += weighted;
        twos[g] += weighted * codes;
        alongs[g] += weighted * here;
      });
    }
    const Lanes one = in_pairs(ones), two = in_pairs(twos), along = in_pairs(alongs);
    const Lanes ground = total * two - one * one;
    const Mask known = ground > 1e-5f * total * two;  // else all codes are alike: no line is told
    const Lanes slope = (total * along - one * linear) / ground;
    const Lanes crossing = (two * linear - one * along) / ground;
    Lanes offset = known ? crossing : low;
    // A format of this kind has no minimum above zero: then the line goes through it.
    const Lanes through = two > 0 ? along / two : all(0);
    const Lanes steep = ((offset > 0) | ~known) ? through : slope;
    offset = offset > 0 ? all(0) : offset;
    const Lanes error = groups.sum([&](int at) {
      const int g = at / kSize;
      const Lanes off = steep[g] * load(kept + at) + offset[g] - load(x + at);
      return load(weights + at) * (off * off);
    });
    const Mask better = (error < best) & (steep >= 0);
    best = better ? error : best;
    line.scale = better ? steep : line.scale;
    line.least = better ? -offset : line.least;
  });
  return line;
}

// Codes of eight numbers, those from `low` to `high` as numbers from 0 on.
HR_ALWAYS void to_codes(const Lanes& scaled, float low, float high, uint8_t* codes) {
  const Lanes found = nearest_code(scaled, low, high) - low;
  const Mask whole = __builtin_convertvector(found, Mask);
  for (int i = 0; i < 8; ++i) codes[i] = static_cast<uint8_t>(whole[i]);
}

HR_ALWAYS void codes_of(const float* x, int size, float scale, int half, uint8_t* codes) {
  const float inverse = scale != 0 ? 1 / scale : 0;
  const float low = static_cast<float>(-half), high = static_cast<float>(half - 1);
  for (int i = 0; i < size; i += 8) to_codes(load(x + i) * inverse, low, high, codes + i);
}

// Nibbles of `run` codes and of the `run` behind them.
HR_ALWAYS void put_nibbles(const uint8_t* codes, int run, uint8_t* out) {
  for (int i = 0; i < run; ++i)
    out[i] = static_cast<uint8_t>((codes[i] & 15) | (codes[run + i] & 15) << 4);
}

HR_ALWAYS float put_half(float x, uint8_t* out) {
  const uint16_t stored = float_to_half(x);
  memcpy(out, &stored, 2);
  return half_to_float(stored);
}

// Eight blocks of 32 with a scale each, of which `count` are there.
void encode_scaled(int kind, const float* x, int count, uint8_t* out) {
  const int half = kind == HR_Q4_0 ? 8 : 16, bytes = kind == HR_Q4_0 ? 18 : 22;
  const Lanes scales = symmetric<32>(x, half);
  for (int g = 0; g < count; ++g, out += bytes) {
    uint8_t codes[32];
    codes_of(x + 32 * g, 32, put_half(scales[g], out), half, codes);
    uint32_t fifth = 0;
    for (int i = 0; i < 32; ++i) fifth |= static_cast<uint32_t>(codes[i] >> 4) << i;
    if (kind == HR_Q5_0) memcpy(out + 2, &fifth, 4);
    put_nibbles(codes, 16, out + bytes - 16);
  }
}

// The nearest code to each weight, by the scale that makes the largest one 127.
void encode_q8_0(const float* x, int count, uint8_t* out) {
  for (int g = 0; g < count; ++g, x += 32, out += 34) {
    Lanes top = all(0);
    for (int i = 0; i < 32; i += 8) top = larger(size_of(load(x + i)), top);
    float largest = 0;
    for (int i = 0; i < 8; ++i) largest = top[i] > largest ? top[i] : largest;
    const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
    put_half(scale, out);
    for (int i = 0; i < 32; i += 8) {
      // Halves go away from zero, as in C's round. Beyond 128 is what a scale is too small for.
      const Lanes scaled = load(x + i) * inverse;
      const Lanes rounded = size_of(scaled) < 128 ? scaled + (scaled < 0 ? all(-0.5f) : all(0.5f))
                                                  : all(0);
      const Mask whole = __builtin_convertvector(rounded, Mask);
      for (int j = 0; j < 8; ++j) out[2 + i + j] = static_cast<uint8_t>(whole[j]);
    }
  }
}

// How many of its block's unit each is, in six bits.
HR_ALWAYS Lanes share_of(const Lanes& numbers, float unit) {
  return unit > 0 ? nearest_code(numbers / unit, 0, 63) : all(0);
}

// Eight groups of 32, whose scales and minima are six bits of a block's.
void encode_q4_k(const float* x, uint8_t* out) {
  const Line line = affine<32>(x, 15);
  float most = 0, deepest = 0;  // never the zero with a sign
  for (int g = 0; g < 8; ++g) {
    most = line.scale[g] > most ? line.scale[g] : most;
    deepest = line.least[g] > deepest ? line.least[g] : deepest;
  }
  const float step = put_half(most / 63, out), least = put_half(deepest / 63, out + 2);
  const Lanes sixth = share_of(line.scale, step), under = share_of(line.least, least);
  uint8_t codes[256], s[8], m[8];
  for (int g = 0; g < 8; ++g) {
    s[g] = static_cast<uint8_t>(sixth[g]);
    m[g] = static_cast<uint8_t>(under[g]);
    const float slope = sixth[g] * step, offset = under[g] * least;
    for (int i = 32 * g; i < 32 * g + 32; i += 8)
      to_codes(slope > 0 ? (load(x + i) + offset) / slope : all(0), 0, 15, codes + i);
  }
  for (int g = 0; g < 4; ++g) {
    out[4 + g] = static_cast<uint8_t>(s[g] | s[g + 4] >> 4 << 6);
    out[8 + g] = static_cast<uint8_t>(m[g] | m[g + 4] >> 4 << 6);
    out[12 + g] = static_cast<uint8_t>((s[g + 4] & 15) | (m[g + 4] & 15) << 4);
    put_nibbles(codes + 64 * g, 32, out + 16 + 32 * g);
  }
}

// Sixteen groups of 16, whose scales are eight bits of a block's.
void encode_q6_k(const float* x, uint8_t* out) {
  float scales[16];
  store(scales, symmetric<16>(x, 32));
  store(scales + 8, symmetric<16>(x + 128, 32));
  float top = 0;
  for (float scale : scales) top = fabsf(scale) > fabsf(top) ? scale : top;
  const float step = put_half(top / -128, out + 208);
  uint8_t eighths[16], codes[256];
  codes_of(scales, 16, step, 128, eighths);
  for (int g = 0; g < 16; ++g) {
    const int eighth = eighths[g] - 128;
    out[192 + g] = static_cast<uint8_t>(eighth);
    codes_of(x + 16 * g, 16, static_cast<float>(eighth) * step, 32, codes + 16 * g);
  }
  for (int half = 0; half < 2; ++half) {
    const uint8_t* c = codes + 128 * half;
    put_nibbles(c, 64, out + 64 * half);
    for (int i = 0; i < 32; ++i)
      out[128 + 32 * half + i] = static_cast<uint8_t>(c[i] >> 4 | c[32 + i] >> 4 << 2 |
                                                      c[64 + i] >> 4 << 4 | c[96 + i] >> 4 << 6);
  }
}

HR_ALWAYS bool bounded(const float* x, int64_t count) {
  int out = 0;
  for (int64_t i = 0; i < count; ++i) out |= !(fabsf(x[i]) <= kLargest);
  return !out;
}

template <int kSize>
bool scales_of(const float* x, int half, int64_t first, int64_t last, float* scales) {
  if (!bounded(x + first * kSize, (last - first) * kSize)) return false;
  for (int64_t at = first; at < last; at += kGroups) {
    const size_t count = static_cast<size_t>(last - at < kGroups ? last - at : kGroups);
    float eight[kGroups * kSize] = {}, found[kGroups];
    memcpy(eight, x + at * kSize, count * kSize * sizeof(float));
    store(found, symmetric<kSize>(eight, half));
    memcpy(scales + at, found, count * sizeof(float));
  }
  return true;
}

// Pieces [first, last) of `count` numbers of `type` (HR_F32, HR_F16, HR_BF16), whole blocks of
// `kind`. False: a number is not finite, or too large for a half's scale.
bool encode_blocks(int kind, int type, const void* numbers, int64_t count, int64_t first,
                   int64_t last, uint8_t* out) {
  const Format& f = *format_of(kind);
  const auto* from = static_cast<const uint8_t*>(numbers);
  out += first * (kPiece / f.span) * f.file_bytes;
  for (int64_t at = first * kPiece; at < last * kPiece; at += kPiece) {
    float x[kPiece] = {};
    const int here = static_cast<int>(count - at < kPiece ? count - at : kPiece);
    expand_row(type, from + at * dense_bytes(type), here, 1, x);
    if (!bounded(x, kPiece)) return false;
    const int blocks = here / f.span;
    if (kind == HR_Q4_K) encode_q4_k(x, out);
    else if (kind == HR_Q6_K) encode_q6_k(x, out);
    else if (kind == HR_Q8_0) encode_q8_0(x, blocks, out);
    else encode_scaled(kind, x, blocks, out);
    out += blocks * f.file_bytes;
  }
  return true;
}

// Scales of groups [first, last) of `size` numbers (16, 32, 64, 128); likewise.
bool symmetric_scales(const float* numbers, int size, int half, int64_t first, int64_t last,
                      float* scales) {
  switch (size) {
    case 16: return scales_of<16>(numbers, half, first, last, scales);
    case 32: return scales_of<32>(numbers, half, first, last, scales);
    case 64: return scales_of<64>(numbers, half, first, last, scales);
    default: return scales_of<128>(numbers, half, first, last, scales);
  }
}

struct EncodeJob {
  int kind, type;  // of blocks and of their numbers
  const void* numbers;
  int64_t count;
  int size, half;  // of scales alone: a group's numbers, and codes of either sign
  void* out;
  bool wrong[256];
};

void encode_share(void* context, int thread, int threads) {
  auto& job = *static_cast<EncodeJob*>(context);
  const int64_t parts = job.size ? job.count / job.size : (job.count + kPiece - 1) / kPiece;
  const int64_t first = parts * thread / threads, last = parts * (thread + 1) / threads;
  job.wrong[thread] =
      job.size ? !symmetric_scales(static_cast<const float*>(job.numbers), job.size, job.half,
                                   first, last, static_cast<float*>(job.out))
               : !encode_blocks(job.kind, job.type, job.numbers, job.count, first, last,
                                static_cast<uint8_t*>(job.out));
}

int32_t encode(void* team, EncodeJob job) {
  team_each(static_cast<Team*>(team), encode_share, &job);
  for (int i = 0; i < team_threads(static_cast<Team*>(team)); ++i)
    if (job.wrong[i]) return 1;
  return 0;
}

}  // namespace
}  // namespace hr

int32_t hr_encode(void* team, int32_t kind, int32_t type, const void* numbers, int64_t count,
                  uint8_t* out) {
  return hr::encode(team, {kind, type, numbers, count, 0, 0, out, {}});
}

int32_t hr_symmetric(void* team, const float* numbers, int64_t count, int32_t size, int32_t half,
                     float* scales) {
  return hr::encode(team, {0, 0, numbers, count, size, half, scales, {}});
}
