// How many threads of a team the next program gets: fewer while others want the cores.
//
// A caller that waits for the others for more than half of the time would have been done sooner
// with half of them: the work that it did itself doubles, and the waiting goes. So it goes on with
// half, down to itself alone, and tries more again after a rest, which doubles with every attempt
// that fails and shrinks with every one that holds. Bits do not depend on the number of threads, so
// no answer changes. Measured in docs/kernels.md ("Cores that others want").
#pragma once

namespace hr {

constexpr double kWindow = 40e-3;  // seconds of programs before they are judged: several time slices
constexpr double kShortestRest = 80e-3, kLongestRest = 1.28;  // seconds

struct Crew {
  int most, members;
  double time = 0, waited = 0;  // seconds of the programs since the last judgement
  double rest = kShortestRest, again = 0;

  explicit Crew(int threads) : most(threads), members(threads) {}

  // A program ran from `began` to `ended`, `lost` seconds of which its caller waited for others.
  void judge(double began, double ended, double lost) {
    if (members > 1) {
      time += ended - began;
      waited += lost;
      if (time < kWindow) return;
      const bool late = waited > time / 2;
      time = waited = 0;
      if (late) {
        members = (members + 1) / 2;
        again = ended + rest;
        rest = rest * 2 < kLongestRest ? rest * 2 : kLongestRest;
        return;
      }
      rest = rest / 2 > kShortestRest ? rest / 2 : kShortestRest;
    }
    if (members < most && ended >= again) members = members * 2 < most ? members * 2 : most;
  }
};

}  // namespace hr
