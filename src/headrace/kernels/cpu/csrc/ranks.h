// Where the ranks of a group meet: processes of one host, or teams of one process.
//
// What ranks exchange they write where all of them read it: an exchange moves nothing, it is a
// barrier behind which every rank's columns are there. Like the team's own barrier it costs about
// what it costs to pass a cache line to and fro while all of them run; who waits longer sleeps.
#pragma once
#include <stdint.h>

#include <atomic>

#include "records.h"

namespace hr {

class Wire;

// In memory that all ranks share, zeroed before the first of them comes.
struct Fence {
  alignas(64) std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> signs;  // the sum of what those who arrived have said
  alignas(64) std::atomic<uint32_t> phase;
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> broken;  // a rank is gone: whoever saw it go writes this
  alignas(64) Wire* wire;  // of ranks that share no memory: then nobody else has this fence
};

enum Met { kMet = 0, kBroken = -2, kStrangers = -3 };

// Sleep until a word of memory that ranks share is no longer `seen`, or the group has ended.
Met await_change(Fence* fence, std::atomic<uint32_t>* word, uint32_t seen);
void wake_all(std::atomic<uint32_t>* word);

// Wait for all ranks, and for their columns where they come over a wire. `sign` is what this one
// believes to be doing: ranks that differ in it are in different places of their programs, and the
// group is broken for good (kStrangers).
Met meet(const HrExchange& op, uint32_t sign, const HrStep* step);

}  // namespace hr
