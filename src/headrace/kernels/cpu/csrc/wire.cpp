#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "pause.h"

namespace hr {
namespace {

constexpr int kLooks = 200;      // without anything moving before a rank sleeps: some 60 µs
constexpr int kLookAgain = 20;   // ms for which a sleeper may not see that the group has ended
constexpr int kFailed = -1;

// Of this step; of codes too, which lie in blocks of six.
int64_t rows_of(const HrPiece& piece, const HrStep* step) {
  int64_t rows = 1;
  if (piece.spans) {
    const HrSpan* last = piece.spans;
    while (last->expert >= 0) ++last;
    rows = last->first;
  } else if (piece.rows >= 0) {
    rows = piece.rows == HR_ROWS_R ? step->r : step->n;
  }
  return rows;
}

// Between the columns or rows of a rank and one run of bytes, in the direction that `copy` takes.
template <class Copy>
void each_row(const HrPiece* pieces, int count, const HrStep* step, int rank, Copy copy) {
  for (int i = 0; i < count; ++i) {
    const HrPiece& piece = pieces[i];
    const int64_t* bounds = piece.bounds + (piece.owners ? 0 : rank);
    const int64_t first = bounds[0], size = bounds[1] - first;
    const auto run = [&](int64_t from, int64_t rows) {
      uint8_t* at = piece.data + from * piece.stride + first;
      for (; size > 0 && rows > 0; rows -= piece.together, at += piece.stride)
        if (rows >= piece.together) copy(at, static_cast<size_t>(size));
        else  // of the last block the rows that there are: a step of one row sends a sixth
          for (int64_t unit = 0; unit < size; unit += sizeof(HrSix))
            copy(at + unit, static_cast<size_t>(rows) * sizeof(HrLane));
    };
    if (!piece.owners) run(0, rows_of(piece, step));
    for (const HrSpan* span = piece.spans; piece.owners && span->expert >= 0; ++span)
      if (piece.owners[span->expert] == rank) run(span->first, span->count);
  }
}

size_t bytes_of(const HrPiece* pieces, int count, const HrStep* step, int rank) {
  size_t all = 0;
  each_row(pieces, count, step, rank, [&](const uint8_t*, size_t size) { all += size; });
  return all;
}

}  // namespace

Wire::Wire(int ranks, int rank, int stages, const int32_t* sockets)
    : rank_(rank), first_(rank - rank % (ranks / stages)), last_(first_ + ranks / stages),
      sockets_(sockets, sockets + ranks), peers_(static_cast<size_t>(ranks)) {}

Met Wire::fail(Fence* fence, int rank, Met how) {
  if (how == kBroken) culprit = rank;
  fence->broken.store(how == kStrangers ? 2 : 1, std::memory_order_release);
  return how;
}

int Wire::move(int rank) {
  Peer& peer = peers_[rank];
  bool moved = false;
  if (peer.sent < out_.size()) {
    const ssize_t n = send(sockets_[rank], out_.data() + peer.sent, out_.size() - peer.sent,
                           MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) peer.sent += static_cast<size_t>(n), moved = true;
    else if (n < 0 && errno != EAGAIN && errno != EINTR) return kFailed;
  }
  if (peer.got < peer.in.size()) {
    const ssize_t n =
        recv(sockets_[rank], peer.in.data() + peer.got, peer.in.size() - peer.got, MSG_DONTWAIT);
    if (n > 0) peer.got += static_cast<size_t>(n), moved = true;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR)) return kFailed;
  }
  return moved;
}

Met Wire::move_all(Fence* fence, int first, int last) {
  const auto broken = [&] { return fence->broken.load(std::memory_order_acquire); };
  const auto done = [&](const Peer& peer) {
    return peer.sent == out_.size() && peer.got == peer.in.size();
  };
  for (int idle = 0;;) {
    bool all = true, moved = false;
    for (int rank = first; rank < last; ++rank) {
      Peer& peer = peers_[rank];
      if (done(peer)) continue;
      const bool headless = peer.got < sizeof(Head);
      const int did = move(rank);
      if (did < 0) return fail(fence, rank, kBroken);
      moved |= did > 0;
      // Before its columns: those of another place have another size, and may never come.
      if (headless && peer.got >= sizeof(Head) &&
          memcmp(peer.in.data(), &peer.expected, sizeof(Head)))
        return fail(fence, rank, kStrangers);
      all &= done(peer);
    }
    if (all) return kMet;
    if (moved) { idle = 0; continue; }
    if (++idle < kLooks) { pause_cpu(); continue; }
    if (broken()) return broken() == 2 ? kStrangers : kBroken;
    pollfd wanted[HR_MOST_RANKS];
    nfds_t waiting = 0;
    for (int rank = first; rank < last; ++rank) {
      short events = 0;
      if (peers_[rank].got < peers_[rank].in.size()) events |= POLLIN;
      if (peers_[rank].sent < out_.size()) events |= POLLOUT;
      if (events) wanted[waiting++] = {sockets_[rank], events, 0};
    }
    poll(wanted, waiting, kLookAgain);
  }
}

Met Wire::exchange(Fence* fence, uint32_t sign, const HrPiece* pieces, int count,
                   const HrStep* step) {
  if (const auto broken = fence->broken.load(std::memory_order_acquire))
    return broken == 2 ? kStrangers : kBroken;
  const auto head_of = [&](int rank) {
    return Head{sign, number_, bytes_of(pieces, count, step, rank - first_)};
  };
  const Head mine = head_of(rank_);
  out_.resize(sizeof(Head) + mine.bytes);
  memcpy(out_.data(), &mine, sizeof(Head));
  uint8_t* to = out_.data() + sizeof(Head);
  each_row(pieces, count, step, rank_ - first_, [&](const uint8_t* at, size_t size) {
    memcpy(to, at, size);
    to += size;
  });
  for (int rank = first_; rank < last_; ++rank) {
    Peer& peer = peers_[rank];
    peer.expected = head_of(rank);
    peer.in.resize(rank == rank_ ? 0 : sizeof(Head) + peer.expected.bytes);
    peer.sent = rank == rank_ ? out_.size() : 0;
    peer.got = 0;
  }
  if (const Met met = move_all(fence, first_, last_); met != kMet) return met;
  ++number_;
  for (int rank = first_; rank < last_; ++rank) {
    if (rank == rank_) continue;
    const uint8_t* from = peers_[rank].in.data() + sizeof(Head);
    each_row(pieces, count, step, rank - first_, [&](uint8_t* at, size_t size) {
      memcpy(at, from, size);
      from += size;
    });
  }
  return kMet;
}

Met Wire::hand_over(Fence* fence, int peer, bool gives, const HrPiece& piece,
                    const HrStep* step) {
  if (const auto broken = fence->broken.load(std::memory_order_acquire))
    return broken == 2 ? kStrangers : kBroken;
  Peer& other = peers_[peer];
  const Head head = {static_cast<uint32_t>(step->n), other.handed, bytes_of(&piece, 1, step, 0)};
  out_.resize(gives ? sizeof(Head) + head.bytes : 0);
  other.in.resize(gives ? 0 : sizeof(Head) + head.bytes);
  other.expected = head;
  other.sent = other.got = 0;
  if (gives) {
    memcpy(out_.data(), &head, sizeof(Head));
    uint8_t* to = out_.data() + sizeof(Head);
    each_row(&piece, 1, step, 0, [&](const uint8_t* at, size_t size) {
      memcpy(to, at, size);
      to += size;
    });
  }
  if (const Met met = move_all(fence, peer, peer + 1); met != kMet) return met;
  ++other.handed;
  const uint8_t* from = other.in.data() + sizeof(Head);
  if (!gives)
    each_row(&piece, 1, step, 0, [&](uint8_t* at, size_t size) {
      memcpy(at, from, size);
      from += size;
    });
  return kMet;
}

}  // namespace hr
