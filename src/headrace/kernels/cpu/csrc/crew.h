// How many threads of a team the next program gets: fewer while others want the cores.
//
// Where others want the cores, the threads of a program wait for one that the system has put aside.
// If each waits for more than half of the time, half of them would be done sooner where arithmetic
// binds: the work of each doubles, and the waiting goes. So it goes on with half, down to
// one, and tries more again after a rest, which doubles with every attempt that fails and shrinks
// with every one that holds. What was measured lately decides before that rule: no crew is halved
// that is faster than the half. Bits do not depend on the number of threads, so no answer changes.
// Measured in docs/kernels.md ("Cores that others want").
//
// Each program has a crew of its own: of two models whose steps take turns, one may wait for threads
// that the other's answers keep, and the other's time would hide it.
#pragma once
#include <stdint.h>

namespace hr {

constexpr double kWindow = 40e-3;  // seconds of programs before they are judged: several time slices
constexpr double kShortestRest = 80e-3, kLongestRest = 1.28;  // seconds
constexpr double kAlike = 1.25;  // programs with so many times the rows are not compared
constexpr double kSlower = 1.02;  // times of programs that differ by less are the same

struct Crew {
  static constexpr int kHalvings = 12;
  // What the programs of one size of the crew took: seconds a row, rows of one, and when.
  struct Pace {
    double seconds = 0, rows = 0, at = 0;
  };

  int most, members, halved = 0;
  double time = 0, waited = 0, rows = 0;  // of the programs since the last judgement
  int programs = 0;
  double rest = kShortestRest, again = 0;
  Pace paces[kHalvings];

  explicit Crew(int threads = 1) : most(threads), members(threads) {}

  void resize(int halvings) {
    halved = halvings;
    members = most;
    for (int i = 0; i < halved; ++i) members = (members + 1) / 2;
  }

  void note(double ended) {
    Pace& pace = paces[halved];
    const double seconds = time / rows, each = rows / programs;
    const bool alike = each < pace.rows * kAlike && pace.rows < each * kAlike;
    pace.seconds = alike && ended - pace.at < kLongestRest ? (pace.seconds + seconds) / 2 : seconds;
    pace.rows = each;
    pace.at = ended;
  }

  // Whether half the crew was slower, as far as is known.
  bool slower(int half, double ended) const {
    const Pace &few = paces[half], &many = paces[half - 1];
    return few.rows > 0 && few.rows < many.rows * kAlike && many.rows < few.rows * kAlike &&
           ended - few.at < kLongestRest && ended - many.at < kLongestRest &&
           few.seconds > many.seconds * kSlower;
  }

  // A program with n rows ran from `began` to `ended`; each thread waited `lost` seconds for another.
  void judge(double began, double ended, double lost, double n) {
    time += ended - began;
    waited += lost;
    rows += n > 0 ? n : 1;
    ++programs;
    if (time < kWindow) return;
    const bool late = members > 1 && waited > time / 2;
    note(ended);
    time = waited = rows = 0;
    programs = 0;
    if (halved > 0 && slower(halved, ended)) {
      resize(halved - 1);
    } else if (late && halved + 1 < kHalvings) {
      if (slower(halved + 1, ended)) return;
      resize(halved + 1);
      again = ended + rest;
      rest = rest * 2 < kLongestRest ? rest * 2 : kLongestRest;
    } else {
      if (members > 1) rest = rest / 2 > kShortestRest ? rest / 2 : kShortestRest;
      if (halved > 0 && ended >= again) resize(halved - 1);
    }
  }
};

// A crew for each of the programs that ran lately, known by the place of their records.
struct Crews {
  static constexpr int kPlaces = 64;
  Crew crews[kPlaces];
  const void* whose[kPlaces] = {};

  explicit Crews(int threads) {
    for (Crew& one : crews) one = Crew(threads);
  }

  Crew& of(const void* program) {
    const auto place = (reinterpret_cast<uintptr_t>(program) / 64 * 0x9e3779b97f4a7c15u) >> 58;
    if (whose[place] != program) {
      whose[place] = program;
      crews[place] = Crew(crews[place].most);
    }
    return crews[place];
  }
};

}  // namespace hr
