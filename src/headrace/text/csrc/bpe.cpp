// Byte-level BPE of a GGUF vocabulary, without Python: what a start would otherwise wait for.
//
// The tokens and merges stay where the caller has them, as GGUF writes them (a length of 8 bytes
// before each string); here are two hash tables over them: text of a token -> id, and pair of ids
// -> (rank, id of both together). 152,000 tokens and merges take 10 MiB and some 40 ms.
//
// A word begins as the tokens of its bytes; then always the pair of the least rank is joined, the
// leftmost of equals, until no pair is known (Sennrich et al. 2016; the ranks are the order of the
// file). Few symbols: every pair is looked at for each merge. Many: a heap of pairs, so that a word
// of n bytes costs n log n.
//
// Nothing is trusted: strings are UTF-8, hashes are seeded, and what does not fit makes hrt_bpe_new
// return null, upon which the caller asks the slower library, which can say what is wrong.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "hash.h"
#include "words.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint32_t NONE = 0xffffffffu;
constexpr uint32_t BOTH = 0xfffffffeu;  // no rank: the pair is not known
constexpr int64_t LENGTH_BYTES = 8;
constexpr int64_t FEW = 24;

struct Text {
  const char* at;
  int64_t size;
};

// `starts[i]` is the offset of string i's length; `starts[count]` the end of the last one.
struct Strings {
  const char* buffer;
  const int64_t* starts;
  int64_t count;
  Text operator[](int64_t i) const {
    return {buffer + starts[i] + LENGTH_BYTES, starts[i + 1] - starts[i] - LENGTH_BYTES};
  }
};

// Of a text in two parts, so that two tokens need not be copied to be looked for as one.
class Hash {
 public:
  explicit Hash(uint64_t seed) : state_(seed) {}
  void add(Text text) {
    for (int64_t i = 0; i < text.size; ++i) {
      word_ = word_ << 8 | static_cast<unsigned char>(text.at[i]);
      if (++held_ == 8) flush();
    }
  }
  uint64_t value() {
    const uint64_t held = static_cast<uint64_t>(held_);
    flush();
    return mix(state_ ^ held, 0x9e3779b97f4a7c15u);
  }

 private:
  void flush() {
    state_ = mix(state_ ^ word_, 0xa0761d6478bd642fu) + 0xe7037ed1a0b428dbu;
    word_ = 0;
    held_ = 0;
  }
  uint64_t state_, word_ = 0;
  int held_ = 0;
};

struct Join {
  uint64_t pair;  // left << 32 | right
  uint32_t rank, id;
};
constexpr uint64_t EMPTY = ~uint64_t{0};

// Hash tables with open addressing are at most half full.
uint64_t slots(int64_t count) {
  uint64_t size = 16;
  while (size < 2 * static_cast<uint64_t>(count)) size *= 2;
  return size;
}

class Bpe {
 public:
  // False: something of it does not fit.
  bool build(Strings tokens, Strings merges, Rules rules, uint64_t seed) {
    tokens_ = tokens;
    rules_ = rules;
    seed_ = seed | 1;
    if (tokens.count >= BOTH || merges.count >= BOTH) return false;
    ids_.assign(slots(tokens.count), NONE);
    for (int64_t i = 0; i < tokens.count; ++i) {
      const Text text = tokens[i];
      if (!utf8(text.at, text.size)) return false;
      longest_ = std::max(longest_, letters(text));
      ids_[slot(text, {nullptr, 0})] = static_cast<uint32_t>(i);  // the last of equals
    }
    for (int byte = 0; byte < 256; ++byte) {
      char letter[2];
      const uint32_t id = find({letter, letter_of(byte, letter)}, {nullptr, 0});
      if (id == NONE) return false;
      bytes_[byte] = id;
    }
    joins_.assign(slots(merges.count), Join{EMPTY, BOTH, NONE});
    for (int64_t i = 0; i < merges.count; ++i) {
      const Text text = merges[i];
      const auto* space = static_cast<const char*>(
          text.size ? std::memchr(text.at, ' ', static_cast<size_t>(text.size)) : nullptr);
      if (space == nullptr) return false;
      const Text left{text.at, space - text.at};
      const Text right{space + 1, text.size - left.size - 1};
      const uint32_t a = find(left, {nullptr, 0}), b = find(right, {nullptr, 0});
      const uint32_t both = find(left, right);
      // A second space would be part of `right`; the library refuses it, so it is not taken here.
      if (a == NONE || b == NONE || both == NONE) return false;
      if (right.size && std::memchr(right.at, ' ', static_cast<size_t>(right.size))) return false;
      Join& join = joins_[place(uint64_t{a} << 32 | b)];
      join = {uint64_t{a} << 32 | b, static_cast<uint32_t>(i), both};  // the last of equals
    }
    return true;
  }

  int64_t find(const char* at, int64_t size) const {
    const uint32_t id = find({at, size}, {nullptr, 0});
    return id == NONE ? -1 : int64_t{id};
  }

  // Bytes of text that one id stands for, at most.
  int64_t longest() const { return longest_; }

  // `out` has room for one id per byte of the text.
  int64_t encode(const char* text, int64_t size, int32_t* out) const {
    Scratch scratch;
    Words words(rules_, text, size);
    int32_t* end = out;
    while (words.next()) end = word(words.begin(), words.end(), end, scratch);
    return end - out;
  }

 private:
  // 12 and 16 bytes for each byte of a word: a hostile text is one word of tens of megabytes.
  struct Node {
    uint32_t id;
    int32_t before, after;  // -1: none
  };
  struct Candidate {
    uint32_t rank;
    int32_t at;
    uint64_t pair;
    bool operator<(const Candidate& other) const {  // of the queue, whose top is the greatest
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  struct Scratch {
    std::vector<Node> nodes;
    std::vector<Candidate> candidates;
    std::vector<char> written;
  };

  // The letter of a byte in a vocabulary's tokens, as UTF-8 (GPT-2's `bytes_to_unicode`).
  static int64_t letter_of(int byte, char* out) {
    int letter = byte;
    const bool plain = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    if (!plain)
      letter = 256 + (byte <= 32 ? byte : byte < 161 ? byte - 127 + 33 : 67);
    if (letter < 128) {
      out[0] = static_cast<char>(letter);
      return 1;
    }
    out[0] = static_cast<char>(0xc0 | letter >> 6);
    out[1] = static_cast<char>(0x80 | (letter & 63));
    return 2;
  }

  // Characters of a token as written, each of which is a byte of text.
  static int64_t letters(Text text) {
    int64_t count = 0;
    for (int64_t i = 0; i < text.size; ++i) count += (text.at[i] & 0xc0) != 0x80;
    return count;
  }

  bool equals(int64_t id, Text left, Text right) const {
    const Text text = tokens_[id];
    return text.size == left.size + right.size &&
           (!left.size || !std::memcmp(text.at, left.at, static_cast<size_t>(left.size))) &&
           (!right.size ||
            !std::memcmp(text.at + left.size, right.at, static_cast<size_t>(right.size)));
  }
  // Where a text's id is, or belongs.
  uint64_t slot(Text left, Text right) const {
    Hash hash(seed_);
    hash.add(left);
    hash.add(right);
    const uint64_t mask = ids_.size() - 1;
    uint64_t at = hash.value() & mask;
    while (ids_[at] != NONE && !equals(ids_[at], left, right)) at = (at + 1) & mask;
    return at;
  }
  uint32_t find(Text left, Text right) const { return ids_[slot(left, right)]; }

  uint64_t place(uint64_t pair) const {
    const uint64_t mask = joins_.size() - 1;
    uint64_t at = mix(pair ^ seed_, 0x9e3779b97f4a7c15u) & mask;
    while (joins_[at].pair != EMPTY && joins_[at].pair != pair) at = (at + 1) & mask;
    return at;
  }
  const Join& join(uint32_t left, uint32_t right) const {
    return joins_[place(uint64_t{left} << 32 | right)];
  }

  int32_t* word(const char* begin, const char* end, int32_t* out, Scratch& scratch) const {
    const int64_t size = end - begin;
    if (rules_.whole && size <= longest_) {
      const uint32_t id = as_token(begin, size, scratch);
      if (id != NONE) {
        *out++ = static_cast<int32_t>(id);
        return out;
      }
    }
    return size <= FEW ? few(begin, size, out) : many(begin, size, out, scratch);
  }

  // The token that is this word as a whole.
  uint32_t as_token(const char* begin, int64_t size, Scratch& scratch) const {
    scratch.written.resize(static_cast<size_t>(2 * size));
    char* at = scratch.written.data();
    for (int64_t i = 0; i < size; ++i) at += letter_of(static_cast<unsigned char>(begin[i]), at);
    return find({scratch.written.data(), at - scratch.written.data()}, {nullptr, 0});
  }

  int32_t* few(const char* begin, int64_t size, int32_t* out) const {
    uint32_t ids[FEW];
    Join joins[FEW];  // of each symbol with its neighbour to the right
    for (int64_t i = 0; i < size; ++i) ids[i] = bytes_[static_cast<unsigned char>(begin[i])];
    for (int64_t i = 0; i + 1 < size; ++i) joins[i] = join(ids[i], ids[i + 1]);
    while (size > 1) {
      int64_t best = 0;
      for (int64_t i = 1; i + 1 < size; ++i)
        if (joins[i].rank < joins[best].rank) best = i;
      if (joins[best].rank == BOTH) break;
      ids[best] = joins[best].id;
      --size;
      for (int64_t i = best + 1; i < size; ++i) ids[i] = ids[i + 1];
      for (int64_t i = best + 1; i + 1 < size; ++i) joins[i] = joins[i + 1];
      if (best + 1 < size) joins[best] = join(ids[best], ids[best + 1]);
      if (best > 0) joins[best - 1] = join(ids[best - 1], ids[best]);
    }
    for (int64_t i = 0; i < size; ++i) *out++ = static_cast<int32_t>(ids[i]);
    return out;
  }

  int32_t* many(const char* begin, int64_t size, int32_t* out, Scratch& scratch) const {
    std::vector<Node>& nodes = scratch.nodes;
    const auto count = static_cast<int32_t>(size);
    nodes.resize(static_cast<size_t>(size));
    for (int32_t i = 0; i < count; ++i)
      nodes[i] = {bytes_[static_cast<unsigned char>(begin[i])], i - 1, i + 1 < count ? i + 1 : -1};
    // Each of fewer than `size` joins takes one candidate away and offers at most two. By hand, for
    // the standard library's queue cannot reserve: growing would hold three times as much.
    std::vector<Candidate>& heap = scratch.candidates;
    heap.clear();
    heap.reserve(static_cast<size_t>(2 * size));
    const auto candidate = [&](int32_t at) {
      if (at < 0 || nodes[at].after < 0) return false;
      const Join& found = join(nodes[at].id, nodes[nodes[at].after].id);
      if (found.rank == BOTH) return false;
      heap.push_back({found.rank, at, found.pair});
      return true;
    };
    const auto offer = [&](int32_t at) {
      if (candidate(at)) std::push_heap(heap.begin(), heap.end());
    };
    for (int32_t i = 0; i < count; ++i) candidate(i);
    std::make_heap(heap.begin(), heap.end());
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      const Candidate top = heap.back();
      heap.pop_back();
      Node& left = nodes[top.at];
      // What was joined since has another pair, or is no symbol any more.
      if (left.id == NONE || left.after < 0) continue;
      Node& right = nodes[left.after];
      if ((uint64_t{left.id} << 32 | right.id) != top.pair) continue;
      left.id = join(left.id, right.id).id;
      right.id = NONE;
      left.after = right.after;
      if (left.after >= 0) nodes[left.after].before = top.at;
      offer(top.at);
      offer(left.before);
    }
    for (int32_t i = 0; i >= 0; i = nodes[i].after) *out++ = static_cast<int32_t>(nodes[i].id);
    return out;
  }

  Strings tokens_{};
  Rules rules_{};
  uint64_t seed_ = 1;
  int64_t longest_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<Join> joins_;
  uint32_t bytes_[256] = {};
};

}  // namespace

API int32_t hrt_version() { return 6; }

// Where each of `count` strings begins, counted from the first one's length, and where the last
// ends: to `starts`, which has room for one more than `count`. Returns the end as an offset in
// `data`, or -1 where it lies behind `end`.
API int64_t hrt_strings(const uint8_t* data, int64_t at, int64_t end, int64_t count,
                        uint64_t* starts) {
  const int64_t begin = at;
  starts[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t length;
    if (end - at < LENGTH_BYTES) return -1;
    std::memcpy(&length, data + at, sizeof length);
    at += LENGTH_BYTES;
    if (length > static_cast<uint64_t>(end - at)) return -1;
    at += static_cast<int64_t>(length);
    starts[i + 1] = static_cast<uint64_t>(at - begin);
  }
  return at;
}

// Null where the vocabulary does not fit or there is no memory. The strings of the tokens have to
// live as long as what is returned, those of the merges until then.
API void* hrt_bpe_new(const char* tokens, const int64_t* token_starts, int64_t token_count,
                      const char* merges, const int64_t* merge_starts, int64_t merge_count,
                      int32_t pattern, int32_t digits, int32_t whole, uint64_t seed) {
  try {
    auto made = std::make_unique<Bpe>();
    const Rules rules{static_cast<Pattern>(pattern), digits, whole != 0};
    if (!made->build({tokens, token_starts, token_count}, {merges, merge_starts, merge_count},
                     rules, seed))
      return nullptr;
    return made.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

API void hrt_bpe_free(void* bpe) { delete static_cast<Bpe*>(bpe); }

// Id of the token that the file writes so, or -1.
API int64_t hrt_bpe_find(const void* bpe, const char* text, int64_t size) {
  return static_cast<const Bpe*>(bpe)->find(text, size);
}

// Bytes of text that one id stands for, at most.
API int64_t hrt_bpe_longest(const void* bpe) { return static_cast<const Bpe*>(bpe)->longest(); }

// Ids of a text (valid UTF-8, `size` bytes) to `out`, which has room for `size`; returns how many,
// or -1 without memory or above 2^31 - 1 bytes. May be called by several threads at once.
API int64_t hrt_bpe_encode(const void* bpe, const char* text, int64_t size, int32_t* out) {
  if (size > INT32_MAX) return -1;
  try {
    return static_cast<const Bpe*>(bpe)->encode(text, size, out);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
