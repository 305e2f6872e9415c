// What a stage of a model hands to the next: rows of the residual stream.
//
// The stages of several steps compute at a time, so that there are a few slots: who gives waits only
// where the next stage is so many steps behind. Both count what they gave and took, in order.
#pragma once
#include "ranks.h"

namespace hr {

constexpr uint32_t kSlots = 4;

// In memory that both stages share, zeroed before the first of them comes; slots follow, each of
// `most` rows with eight bytes before them that say how many there are.
struct Link {
  alignas(64) std::atomic<uint32_t> given;
  alignas(64) std::atomic<uint32_t> taken;
  alignas(64) uint8_t slots[];
};

Met hand_over(const HrHandover& op, const HrStep* step);

}  // namespace hr
