// Ranks that share no memory: what they exchange goes over sockets, each to each.
//
// Every rank sends its columns to all others and puts theirs where they belong, in buffers of the
// shape that shared ones have: nothing is summed, so what is there afterwards has the same bits. A
// rank reads from a socket only in an exchange of its own, and never beyond it: one that is ahead
// cannot overwrite what is still being read.
#pragma once
#include <stddef.h>
#include <sys/uio.h>

#include <atomic>
#include <vector>

#include "ranks.h"

namespace hr {

class Wire {
 public:
  // `sockets` [ranks]: connected to each rank, and stay the caller's; the own one is not looked at.
  // Ranks of a stage, of which all stages have as many, come one after the other.
  Wire(int ranks, int rank, int stages, const int32_t* sockets);
  // The columns of `pieces` of all ranks of this stage, or none of them: a meeting alone. The first
  // rank that is gone is kept in `culprit`.
  Met exchange(Fence* fence, uint32_t sign, const HrPiece* pieces, int count, const HrStep* step);

  // Rows of a stage to the next one, or from the one before.
  Met hand_over(Fence* fence, int peer, bool gives, const HrPiece& piece, const HrStep* step);

  std::atomic<int> culprit{-1};

 private:
  struct Head {
    uint32_t sign;
    uint32_t number;  // of the exchange, from the first on
    uint64_t bytes;
  };
  // A head, then columns: a long message is sent from where they lie and read to where they
  // belong, a short one is one run of bytes that is copied.
  struct Message {
    Head head;
    std::vector<iovec> parts;    // what calls move
    std::vector<iovec> columns;  // where the bytes of `packed` come from or go to, the head too
    std::vector<uint8_t> packed;
    void lay(uint32_t sign, uint32_t number, const HrPiece* pieces, int count, const HrStep* step,
             int rank);
    void copy(bool gives);
  };
  struct Way {
    size_t part, byte;  // the next one
  };
  struct Peer {
    Message in;
    Head expected;
    Way sent, got;
    uint32_t handed;  // handovers so far: with one peer they go in one direction
  };
  // What one call to or from one peer moves: 0: nothing; 1: something; or it failed.
  int move(int rank, bool gives);
  // Until everything is sent to `first` … `last` - 1 and read from them.
  Met move_all(Fence* fence, int first, int last);
  Met fail(Fence* fence, int rank, Met how);

  int rank_, first_, last_;  // this one, and those of its stage
  uint32_t number_ = 0;
  std::vector<int> sockets_;
  std::vector<Peer> peers_;
  Message out_;
};

}  // namespace hr
