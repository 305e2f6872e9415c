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

// In memory that all ranks share, zeroed before the first of them comes.
struct Fence {
  alignas(64) std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> signs;  // the sum of what those who arrived have said
  alignas(64) std::atomic<uint32_t> phase;
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> broken;  // a rank is gone: whoever saw it go writes this
};

enum Met { kMet = 0, kBroken = -2, kStrangers = -3 };

// Wait for all ranks. `sign` is what this one believes to be doing: ranks that differ in it are in
// different places of their programs, and the group is broken for good (kStrangers).
Met meet(Fence* fence, int32_t ranks, uint32_t sign);

}  // namespace hr
