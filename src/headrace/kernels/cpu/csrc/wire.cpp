#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>

#include "pause.h"

namespace hr {
namespace {

// Without anything moving a rank looks (some 40 µs), then gives its core away between looks, and
// only then sleeps: who sends to a sleeper pays for waking it, three times what the sending takes.
constexpr int kLooks = 100;
constexpr int64_t kAwake = 300'000;  // ns
constexpr int kLookAgain = 20;       // ms for which a sleeper may not see that the group has ended
constexpr size_t kParts = 64;        // of one call: the other direction moves between two
constexpr size_t kShort = 1 << 16;   // bytes of a message that is copied: a part costs some 0.1 µs
constexpr int kFailed = -1;

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

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

// Calls `visit` with each run of bytes of the columns or rows of a rank.
template <class Visit>
void each_row(const HrPiece* pieces, int count, const HrStep* step, int rank, Visit visit) {
  for (int i = 0; i < count; ++i) {
    const HrPiece& piece = pieces[i];
    const int64_t* bounds = piece.bounds + (piece.owners ? 0 : rank);
    const int64_t first = bounds[0], size = bounds[1] - first;
    const auto run = [&](int64_t from, int64_t rows) {
      uint8_t* at = piece.data + from * piece.stride + first;
      for (; size > 0 && rows > 0; rows -= piece.together, at += piece.stride)
        if (rows >= piece.together) visit(at, static_cast<size_t>(size));
        else  // of the last block the rows that there are: a step of one row sends a sixth
          for (int64_t unit = 0; unit < size; unit += sizeof(HrSix))
            visit(at + unit, static_cast<size_t>(rows) * sizeof(HrLane));
    };
    if (!piece.owners) run(0, rows_of(piece, step));
    for (const HrSpan* span = piece.spans; piece.owners && span->expert >= 0; ++span)
      if (piece.owners[span->expert] == rank) run(span->first, span->count);
  }
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

void Wire::Message::lay(uint32_t sign, uint32_t number, const HrPiece* pieces, int count,
                        const HrStep* step, int rank) {
  head = {sign, number, 0};
  parts.assign(1, {&head, sizeof(Head)});
  each_row(pieces, count, step, rank, [&](uint8_t* at, size_t size) {
    head.bytes += size;
    iovec& last = parts.back();
    if (static_cast<uint8_t*>(last.iov_base) + last.iov_len == at) last.iov_len += size;
    else parts.push_back({at, size});
  });
  columns.clear();
  if (head.bytes > kShort) return;
  columns.swap(parts);
  packed.resize(sizeof(Head) + head.bytes);
  parts.assign(1, {packed.data(), packed.size()});
}

void Wire::Message::copy(bool gives) {
  uint8_t* at = packed.data();
  for (const iovec& run : columns) {
    if (gives) memcpy(at, run.iov_base, run.iov_len);
    else memcpy(run.iov_base, at, run.iov_len);
    at += run.iov_len;
  }
}

int Wire::move(int rank, bool gives) {
  Peer& peer = peers_[rank];
  std::vector<iovec>& parts = gives ? out_.parts : peer.in.parts;
  Way& way = gives ? peer.sent : peer.got;
  if (way.part == parts.size()) return 0;
  iovec& first = parts[way.part];
  const iovec whole = first;
  first = {static_cast<uint8_t*>(whole.iov_base) + way.byte, whole.iov_len - way.byte};
  msghdr call{};
  call.msg_iov = &first;
  call.msg_iovlen = std::min(parts.size() - way.part, kParts);
  const ssize_t n = gives ? sendmsg(sockets_[rank], &call, MSG_DONTWAIT | MSG_NOSIGNAL)
                          : recvmsg(sockets_[rank], &call, MSG_DONTWAIT);
  first = whole;
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n <= 0) return kFailed;
  way.byte += static_cast<size_t>(n);
  while (way.part < parts.size() && way.byte >= parts[way.part].iov_len)
    way.byte -= parts[way.part++].iov_len;
  return 1;
}

Met Wire::move_all(Fence* fence, int first, int last) {
  const auto broken = [&] { return fence->broken.load(std::memory_order_acquire); };
  const auto done = [&](const Peer& peer) {
    return peer.sent.part == out_.parts.size() && peer.got.part == peer.in.parts.size();
  };
  int64_t since = 0;  // when the looks were over
  for (int idle = 0;;) {
    bool all = true, moved = false;
    for (int rank = first; rank < last; ++rank) {
      Peer& peer = peers_[rank];
      if (done(peer)) continue;
      const auto headless = [&] { return !peer.got.part && peer.got.byte < sizeof(Head); };
      const bool before = headless();
      const int gave = move(rank, true), took = gave < 0 ? gave : move(rank, false);
      if (took < 0) return fail(fence, rank, kBroken);
      moved |= gave || took;
      // At once: columns of another place have another size, and may never come.
      if (before && !headless() && !peer.in.parts.empty() &&
          memcmp(peer.in.parts[0].iov_base, &peer.expected, sizeof(Head)))
        return fail(fence, rank, kStrangers);
      all &= done(peer);
    }
    if (all) return kMet;
    if (moved) { idle = 0; continue; }
    if (++idle < kLooks) { pause_cpu(); continue; }
    if (idle == kLooks) since = now();
    if (now() - since < kAwake) { sched_yield(); continue; }
    if (broken()) return broken() == 2 ? kStrangers : kBroken;
    pollfd wanted[HR_MOST_RANKS];
    nfds_t waiting = 0;
    for (int rank = first; rank < last; ++rank) {
      short events = 0;
      if (peers_[rank].got.part < peers_[rank].in.parts.size()) events |= POLLIN;
      if (peers_[rank].sent.part < out_.parts.size()) events |= POLLOUT;
      if (events) wanted[waiting++] = {sockets_[rank], events, 0};
    }
    poll(wanted, waiting, kLookAgain);
  }
}

Met Wire::exchange(Fence* fence, uint32_t sign, const HrPiece* pieces, int count,
                   const HrStep* step) {
  if (const auto broken = fence->broken.load(std::memory_order_acquire))
    return broken == 2 ? kStrangers : kBroken;
  out_.lay(sign, number_, pieces, count, step, rank_ - first_);
  out_.copy(true);
  for (int rank = first_; rank < last_; ++rank) {
    Peer& peer = peers_[rank];
    peer.got = {};
    peer.sent = {rank == rank_ ? out_.parts.size() : 0, 0};
    if (rank == rank_) continue;
    peer.in.lay(sign, number_, pieces, count, step, rank - first_);
    peer.expected = peer.in.head;
  }
  if (const Met met = move_all(fence, first_, last_); met != kMet) return met;
  ++number_;
  for (int rank = first_; rank < last_; ++rank)
    if (rank != rank_) peers_[rank].in.copy(false);
  return kMet;
}

Met Wire::hand_over(Fence* fence, int peer, bool gives, const HrPiece& piece,
                    const HrStep* step) {
  if (const auto broken = fence->broken.load(std::memory_order_acquire))
    return broken == 2 ? kStrangers : kBroken;
  Peer& other = peers_[peer];
  Message& message = gives ? out_ : other.in;
  (gives ? other.in : out_).parts.clear();
  message.lay(static_cast<uint32_t>(step->n), other.handed, &piece, 1, step, 0);
  other.expected = message.head;
  other.sent = other.got = {};
  if (gives) message.copy(true);
  if (const Met met = move_all(fence, peer, peer + 1); met != kMet) return met;
  ++other.handed;
  if (!gives) message.copy(false);
  return kMet;
}

}  // namespace hr
