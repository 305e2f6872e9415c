// Cutting text into words before byte-level BPE, as the patterns of `text/pretokenize.py` do.
//
// Two patterns are known, written out by hand; the others are left to the regular expressions of
// the library. In both the alternatives are tried in their order, and every character belongs to
// one of them, so that words follow each other without gaps.
//
//   GPT2   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   CL100K (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}
//          | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//
// Text is valid UTF-8: the caller has encoded it from Python's.

#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace {

enum class Pattern : int32_t { GPT2 = 0, CL100K = 1 };

struct Rules {
  Pattern pattern;
  int32_t digits;  // of a word of digits, CL100K only
  bool whole;      // a word that is a token is taken as it is
};

enum Class : uint8_t { OTHER = 0, LETTER = 1, NUMBER = 2, SPACE = 3 };

// Each run of code points of one class: (first << 2 | class), ascending; the first is 0.
constexpr uint32_t RUNS[] = {
#include "classes.inc"
};

inline Class class_of(uint32_t code) {
  const uint32_t wanted = code << 2 | 3;
  const uint32_t* run = std::upper_bound(std::begin(RUNS), std::end(RUNS), wanted) - 1;
  return static_cast<Class>(*run & 3);
}

struct AsciiClasses {
  Class of[128];
  AsciiClasses() {
    for (uint32_t code = 0; code < 128; ++code) of[code] = class_of(code);
  }
};

struct Letter {
  Class kind;
  int32_t size;  // bytes; 0 at the end of the text
  uint32_t code;
};

inline Letter letter_at(const char* at, const char* end) {
  static const AsciiClasses ascii;
  if (at == end) return {OTHER, 0, 0};
  const auto byte = [at](int i) { return static_cast<uint32_t>(static_cast<unsigned char>(at[i])); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {ascii.of[first], 1, first};
  uint32_t code;
  int32_t size;
  if (first < 0xe0) {
    code = (first & 31) << 6 | (byte(1) & 63);
    size = 2;
  } else if (first < 0xf0) {
    code = (first & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
    size = 3;
  } else {
    code = (first & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
    size = 4;
  }
  return {class_of(code), size, code};
}

class Words {
 public:
  Words(Rules rules, const char* text, int64_t size)
      : rules_(rules), last_(text + size), begin_(text), end_(text) {}

  // Go to the next word; false: there is none.
  bool next() {
    begin_ = end_;
    if (begin_ == last_) return false;
    end_ = rules_.pattern == Pattern::GPT2 ? gpt2() : cl100k();
    return true;
  }
  const char* begin() const { return begin_; }
  const char* end() const { return end_; }

 private:
  Letter at(const char* place) const { return letter_at(place, last_); }

  const char* run(const char* place, Class kind) const {
    for (Letter letter = at(place); letter.size && letter.kind == kind; letter = at(place))
      place += letter.size;
    return place;
  }

  // Behind 's, 't, 're, 've, 'm, 'll, 'd at the word's begin, or null.
  const char* contraction(bool any_case) const {
    if (*begin_ != '\'') return nullptr;
    const auto lower = [&](const char* place, uint32_t& code) {
      const Letter letter = at(place);
      code = letter.size ? letter.code : 0;
      if (any_case && code >= 'A' && code <= 'Z') code += 'a' - 'A';
      if (any_case && code == 0x17f) code = 's';  // the long s folds to it
      return place + letter.size;
    };
    uint32_t one, two;
    const char* behind = lower(begin_ + 1, one);
    if (one == 's' || one == 't' || one == 'm' || one == 'd') return behind;
    const char* behind_two = lower(behind, two);
    if ((one == 'r' || one == 'v') && two == 'e') return behind_two;
    if (one == 'l' && two == 'l') return behind_two;
    return nullptr;
  }

  const char* gpt2() const {
    if (const char* found = contraction(false)) return found;
    const char* start = *begin_ == ' ' ? begin_ + 1 : begin_;
    const Letter first = at(start);
    if (first.size && first.kind != SPACE) return run(start, first.kind);
    return spaces();
  }

  const char* cl100k() const {
    if (const char* found = contraction(true)) return found;
    const Letter first = at(begin_);
    if (first.kind == LETTER) return run(begin_, LETTER);
    const char* second = begin_ + first.size;
    if (first.kind == NUMBER) {
      for (int32_t count = 1; count < rules_.digits; ++count) {
        const Letter digit = at(second);
        if (!digit.size || digit.kind != NUMBER) break;
        second += digit.size;
      }
      return second;
    }
    if (first.code != '\r' && first.code != '\n') {
      const Letter letter = at(second);
      if (letter.size && letter.kind == LETTER) return run(second, LETTER);
    }
    const char* start = first.code == ' ' ? second : begin_;
    const Letter mark = at(start);
    if (mark.size && mark.kind == OTHER) {
      const char* place = run(start, OTHER);
      while (place != last_ && (*place == '\r' || *place == '\n')) ++place;
      return place;
    }
    const char* line = nullptr;  // behind the last line end of the run
    for (const char* place = begin_;;) {
      const Letter letter = at(place);
      if (!letter.size || letter.kind != SPACE) break;
      place += letter.size;
      if (letter.code == '\r' || letter.code == '\n') line = place;
    }
    return line != nullptr ? line : spaces();
  }

  // \s+(?!\S)|\s+: a run of spaces but the last one, which goes to the word that follows.
  const char* spaces() const {
    const char *place = begin_, *before = begin_;
    for (Letter letter = at(place); letter.size && letter.kind == SPACE; letter = at(place)) {
      before = place;
      place += letter.size;
    }
    return place == last_ || before == begin_ ? place : before;
  }

  Rules rules_;
  const char* last_;
  const char *begin_, *end_;
};

// Is it UTF-8 as Python reads it: shortest forms, no surrogates, nothing above U+10FFFF?
inline bool utf8(const char* text, int64_t size) {
  const char* end = text + size;
  while (text < end) {
    const uint32_t first = static_cast<unsigned char>(*text);
    const int more = first < 0x80 ? 0 : first < 0xc2 ? -1 : first < 0xe0 ? 1 : first < 0xf0 ? 2
                     : first < 0xf5 ? 3 : -1;
    if (more < 0 || end - text <= more) return false;
    for (int i = 1; i <= more; ++i)
      if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return false;
    if (more >= 2) {
      const uint32_t two = first << 8 | static_cast<unsigned char>(text[1]);
      if (two < 0xe0a0 || (two >= 0xeda0 && two < 0xee00) || (two >= 0xf000 && two < 0xf090) ||
          two >= 0xf490)
        return false;
    }
    text += more + 1;
  }
  return true;
}

}  // namespace
