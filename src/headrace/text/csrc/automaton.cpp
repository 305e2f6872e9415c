// A suffix automaton of texts that grow token by token, which counts what followed what.
//
// The automaton is the smallest graph whose paths from the root spell exactly the substrings of the
// texts (Blumer and others 1985; the online construction: Crochemore). A state stands for substrings
// that occur at the same places; its link leads to the state of its longest suffix that occurs at
// more. Both together find the longest context that was seen before, and hold how often: what
// SuffixDecoding (Oliaro and others, arXiv 2411.04975) keeps in a suffix tree.
//
// Contexts count up to `depth` tokens: a count is exact for any substring of at most that many
// tokens and the one behind it, and costs at most `depth` steps a token. Nobody asks for longer
// ones, so a text is spelt in windows that overlap by `depth`: no token adds more than `window`
// edges, whatever strangers write (a substring that begins a window may then have a state of its
// own).
//
// A state's first edge lies in it; further ones are a list through `edges_` and are found by a hash
// of (state, token), whose seed is the caller's. Tokens are any numbers but NONE.

#include <cstdint>
#include <new>
#include <vector>

#include "hash.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t ROOT = 0;
constexpr int32_t NONE = -1;

struct State {
  int32_t length;  // of its longest substring
  int32_t link;
  int32_t token, target;  // the first edge
  int32_t count;          // how often its substrings occur
  int32_t best;           // the token that followed most often; of equals the one that did last
  int32_t more;           // the newest of its further edges
};

struct Edge {
  int32_t state, token, target;
  int32_t next;
};

// A state, and how many tokens of context it stands for.
struct Context {
  int32_t state, length;
};

// Room for one more, which grows by a quarter: a bound on bytes need not wait for twice as many.
template <typename T>
void make_room(std::vector<T>& values) {
  if (values.size() == values.capacity()) values.reserve(values.size() + values.size() / 4 + 8);
}

class Automaton {
 public:
  Automaton(int32_t depth, int32_t window, uint64_t seed)
      : depth_(depth), window_(window), seed_(seed) {
    state(0);
    states_[ROOT].link = NONE;
    places_.assign(8, NONE);
  }

  int64_t held() const {
    return static_cast<int64_t>(states_.capacity() * sizeof(State) +
                                edges_.capacity() * sizeof(Edge) +
                                (places_.capacity() + last_.capacity()) * sizeof(int32_t));
  }

  Context end() const { return end_; }

  // Begin a new text; or go on with one behind its last tokens, which count no more.
  void cut(const int32_t* behind, int64_t count) {
    const int64_t some = count < depth_ ? count : depth_;
    spelt_ = ROOT;
    end_ = {ROOT, 0};
    last_.assign(behind + count - some, behind + count);
    for (int32_t token : last_) {
      spell(token);
      end_ = next(end_, token);
    }
  }

  void extend(const int32_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (static_cast<int64_t>(last_.size()) == window_) turn();
      last_.push_back(tokens[i]);
      spell(tokens[i]);
      tally(tokens[i]);
    }
  }

  // The longest suffix of a context and a token behind it that the texts contain.
  Context next(Context context, int32_t token) const {
    context = settled(context);
    int32_t target;
    while ((target = follow(context.state, token)) == NONE) {
      context.state = states_[context.state].link;
      if (context.state == NONE) return {ROOT, 0};
      context.length = states_[context.state].length;
    }
    return settled({target, context.length < depth_ ? context.length + 1 : depth_});
  }

  // The longest proper suffix of a context that another state stands for.
  Context shorter(Context context) const {
    const int32_t state = states_[settled(context).state].link;
    return state == NONE ? Context{ROOT, 0} : Context{state, states_[state].length};
  }

  int32_t count(Context context) const { return states_[settled(context).state].count; }
  int32_t best(Context context) const { return states_[settled(context).state].best; }

  // The likeliest tokens behind a context, at most `most`, to `out`, as long as their frequency is
  // at least `least`, and how many of them are expected to hold. Of the context, which is
  // shortened until something followed it, `ends` occurrences are followed by nothing yet.
  int32_t path(Context& context, int32_t ends, int32_t shortest, int32_t most, double least,
               int32_t* out, double* score) const {
    *score = 0;
    while (context.length > 0 && ((ends > 0 && count(context) <= ends) || best(context) == NONE))
      context = shorter(context);
    if (context.length < shortest) return 0;
    Context at = context;
    double alive = 1;
    int32_t found = 0;
    for (int32_t token; found < most && (token = best(at)) != NONE; ends = 0) {
      const int32_t seen = count(at) - ends;
      at = next(at, token);
      if (seen > 0 && count(at) < seen) alive *= static_cast<double>(count(at)) / seen;
      if (alive < least) break;
      *score += alive;
      out[found++] = token;
    }
    return found;
  }

 private:
  // A context where its state has been split since it was found.
  Context settled(Context context) const {
    while (context.state != ROOT &&
           states_[states_[context.state].link].length >= context.length)
      context.state = states_[context.state].link;
    return context;
  }

  uint64_t place_of(int32_t state, int32_t token) const {
    const uint64_t both = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 |
                          static_cast<uint32_t>(token);
    return (mix(both ^ seed_, 0x9e3779b97f4a7c15u) >> 32) * places_.size() >> 32;
  }

  // Where the edge stands in `places_`, or the free place for it.
  uint64_t found_at(int32_t state, int32_t token) const {
    uint64_t at = place_of(state, token);
    while (places_[at] != NONE) {
      const Edge& edge = edges_[places_[at]];
      if (edge.state == state && edge.token == token) break;
      if (++at == places_.size()) at = 0;
    }
    return at;
  }

  int32_t follow(int32_t state, int32_t token) const {
    const State& from = states_[state];
    if (from.token == token) return from.target;
    if (from.more == NONE) return NONE;
    const int32_t edge = places_[found_at(state, token)];
    return edge == NONE ? NONE : edges_[edge].target;
  }

  void connect(int32_t state, int32_t token, int32_t target) {
    State& from = states_[state];
    if (from.token == token || from.token == NONE) {
      from.token = token;
      from.target = target;
      return;
    }
    uint64_t at = found_at(state, token);
    if (places_[at] != NONE) {
      edges_[places_[at]].target = target;
      return;
    }
    if ((edges_.size() + 1) * 3 > places_.size() * 2) {
      spread();
      at = found_at(state, token);
    }
    make_room(edges_);
    places_[at] = static_cast<int32_t>(edges_.size());
    edges_.push_back({state, token, target, from.more});
    from.more = places_[at];
  }

  // A third more places, all entered anew.
  void spread() {
    std::vector<int32_t>(places_.size() + places_.size() / 3 + 1, NONE).swap(places_);
    int32_t number = 0;
    for (const Edge& edge : edges_) places_[found_at(edge.state, edge.token)] = number++;
  }

  int32_t state(int32_t length) {
    make_room(states_);
    states_.push_back({length, ROOT, NONE, NONE, 0, NONE, NONE});
    return static_cast<int32_t>(states_.size()) - 1;
  }

  // Begin a window with the end of the one before.
  void turn() {
    spelt_ = ROOT;
    last_.erase(last_.begin(), last_.end() - depth_);
    for (int32_t token : last_) spell(token);
  }

  // The construction's step; where an earlier text went the same way, states are shared.
  void spell(int32_t token) {
    int32_t last = spelt_;
    int32_t target = follow(last, token);
    if (target != NONE) {
      spelt_ = exactly(last, token, target);
      return;
    }
    const int32_t made = spelt_ = state(states_[last].length + 1);
    while (last != NONE && (target = follow(last, token)) == NONE) {
      connect(last, token, made);
      last = states_[last].link;
    }
    if (last != NONE) {
      const int32_t link = exactly(last, token, target);
      states_[made].link = link;
    }
  }

  // The state whose longest substring is `from`'s and the token: `target`, or split off it.
  int32_t exactly(int32_t from, int32_t token, int32_t target) {
    const int32_t length = states_[from].length + 1;
    if (states_[target].length == length) return target;
    const int32_t twin = state(length);
    int32_t edge = states_[target].more;
    states_[twin] = states_[target];
    states_[twin].length = length;
    states_[twin].more = NONE;
    while (edge != NONE) {
      connect(twin, edges_[edge].token, edges_[edge].target);
      edge = edges_[edge].next;
    }
    states_[target].link = twin;
    while (from != NONE && follow(from, token) == target) {
      connect(from, token, twin);
      from = states_[from].link;
    }
    return twin;
  }

  // Count the token behind every context that ends where the text ended, and go on.
  void tally(int32_t token) {
    const Context ended = settled(end_);
    int32_t counted = NONE, first = NONE;
    for (int32_t at = ended.state; at != NONE; at = states_[at].link) {
      const int32_t target = follow(at, token);
      if (target != counted) {
        ++states_[target].count;
        counted = target;
        if (first == NONE) first = target;
      }
      const int32_t most = states_[at].best;
      if (most != token &&
          (most == NONE || states_[target].count >= states_[follow(at, most)].count))
        states_[at].best = token;
    }
    ++states_[ROOT].count;
    end_ = settled({first, ended.length < depth_ ? ended.length + 1 : depth_});
  }

  int32_t depth_, window_;
  uint64_t seed_;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> places_;  // numbers of edges by the hash of their ends
  std::vector<int32_t> last_;    // the window's tokens
  int32_t spelt_ = ROOT;         // the state of the whole window so far
  Context end_{ROOT, 0};         // the state of the text's last tokens, `depth` at most
};

}  // namespace

// Null without memory. 0 < depth < window.
API void* hrt_automaton_new(int32_t depth, int32_t window, uint64_t seed) {
  try {
    return new Automaton(depth, window, seed);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

API void hrt_automaton_free(void* automaton) { delete static_cast<Automaton*>(automaton); }

// Bytes of memory.
API int64_t hrt_automaton_held(const void* automaton) {
  return static_cast<const Automaton*>(automaton)->held();
}

// The next three: -1 without memory, after which the automaton may only be freed.

API int32_t hrt_automaton_cut(void* automaton, const int32_t* behind, int64_t count) {
  try {
    static_cast<Automaton*>(automaton)->cut(behind, count);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

API int32_t hrt_automaton_extend(void* automaton, const int32_t* tokens, int64_t count) {
  try {
    static_cast<Automaton*>(automaton)->extend(tokens, count);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Contexts are two numbers, state and length; {0, 0} is the empty one.

// Where the text ends, to `context`.
API void hrt_automaton_end(const void* automaton, Context* context) {
  *context = static_cast<const Automaton*>(automaton)->end();
}

// The longest known suffix of a context with the tokens behind it, to `context`.
API void hrt_automaton_follow(const void* automaton, Context* context, const int32_t* tokens,
                              int64_t count) {
  const auto& one = *static_cast<const Automaton*>(automaton);
  for (int64_t i = 0; i < count; ++i) *context = one.next(*context, tokens[i]);
}

// See Automaton::path; `context` becomes the one that it begins behind.
API int32_t hrt_automaton_path(const void* automaton, Context* context, int32_t ends,
                               int32_t shortest, int32_t most, double least, int32_t* out,
                               double* score) {
  return static_cast<const Automaton*>(automaton)->path(*context, ends, shortest, most, least, out,
                                                        score);
}

// How often a context occurs, and the token that followed it most often (-1: nothing did).
API void hrt_automaton_counts(const void* automaton, const Context* context, int32_t* out) {
  const auto& one = *static_cast<const Automaton*>(automaton);
  out[0] = one.count(*context);
  out[1] = one.best(*context);
}
