#include "handover.h"

#include <string.h>

#include "wire.h"

namespace hr {
namespace {

uint8_t* slot_of(const HrHandover& op, Link* link, uint32_t number) {
  const size_t each = 64 + static_cast<size_t>(op.most) * static_cast<size_t>(op.width) * 4;
  return link->slots + number % kSlots * each;
}

}  // namespace

Met hand_over(const HrHandover& op, const HrStep* step) {
  auto* const fence = static_cast<Fence*>(op.fence);
  const size_t row = static_cast<size_t>(op.width) * 4;
  if (fence->wire) {
    const int64_t bounds[] = {0, static_cast<int64_t>(row)};
    const HrPiece piece = {reinterpret_cast<uint8_t*>(op.data), op.stride * 4, bounds, nullptr,
                           nullptr, HR_ROWS_N, 1};
    return fence->wire->hand_over(fence, op.peer, op.gives, piece, step);
  }
  auto* const link = static_cast<Link*>(op.link);
  auto& mine = op.gives ? link->given : link->taken;
  auto& theirs = op.gives ? link->taken : link->given;
  const uint32_t number = mine.load(std::memory_order_relaxed);
  const auto there = [&] {
    const uint32_t other = theirs.load(std::memory_order_acquire);
    return op.gives ? number - other < kSlots : other != number;
  };
  while (!there()) {
    const uint32_t seen = theirs.load(std::memory_order_acquire);
    if (there()) break;
    if (const Met broken = await_change(fence, &theirs, seen); broken != kMet) return broken;
  }
  uint8_t* const slot = slot_of(op, link, number);
  const int64_t rows = step->n;
  if (op.gives) {
    memcpy(slot, &rows, sizeof rows);
  } else if (memcmp(slot, &rows, sizeof rows)) {
    fence->broken.store(2, std::memory_order_release);
    return kStrangers;
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* const here = op.data + r * op.stride;
    uint8_t* const shared = slot + 64 + static_cast<size_t>(r) * row;
    if (op.gives) memcpy(shared, here, row);
    else memcpy(here, shared, row);
  }
  mine.store(number + 1, std::memory_order_release);
  wake_all(&mine);
  return kMet;
}

}  // namespace hr
