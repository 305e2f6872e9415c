// Blocks of KV between the arrays of the layers and one piece of memory, another pool or a socket:
// in one call, since tens of pieces of a few kilobytes would each take the interpreter's lock again.

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;

// What one call of the system takes: of Linux's 1,024 at most.
constexpr int kParts = 512;

// All of the parts through the socket, by `until`. Returns 0 or what `errno` says.
int pass(int file, bool sends, iovec* parts, int count, Clock::time_point until) {
  int at = 0;
  while (at < count) {
    msghdr message{};
    message.msg_iov = parts + at;
    message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count - at);
    ssize_t moved = sends ? sendmsg(file, &message, MSG_NOSIGNAL) : recvmsg(file, &message, 0);
    if (moved == 0 && !sends) return ECONNRESET;
    if (moved < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) return errno;
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      if (left < 0) return ETIMEDOUT;
      pollfd wait{file, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
      if (poll(&wait, 1, static_cast<int>(left) + 1) == 0) return ETIMEDOUT;
      continue;
    }
    for (; at < count && static_cast<size_t>(moved) >= parts[at].iov_len; ++at)
      moved -= static_cast<ssize_t>(parts[at].iov_len);
    if (at < count) {
      parts[at].iov_base = static_cast<char*>(parts[at].iov_base) + moved;
      parts[at].iov_len -= static_cast<size_t>(moved);
    }
  }
  return 0;
}

int pass_all(int file, bool sends, char* const* at, const int64_t* sizes, int64_t count,
             double seconds) {
  const auto until = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
  iovec parts[kParts];
  for (int64_t i = 0; i < count;) {
    int found = 0;
    for (; i < count; ++i) {
      iovec* last = parts + found - 1;
      if (found && static_cast<char*>(last->iov_base) + last->iov_len == at[i])
        last->iov_len += static_cast<size_t>(sizes[i]);
      else if (found < kParts)
        parts[found++] = {at[i], static_cast<size_t>(sizes[i])};
      else
        break;
    }
    if (const int wrong = pass(file, sends, parts, found, until)) return wrong;
  }
  return 0;
}

// A copy of what is not looked at soon: past the caches, so that the target is not read before it is
// written.
void stream(char* to, const char* from, size_t size) {
#ifdef __SSE2__
  const size_t head = std::min(size, (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16);
  std::memcpy(to, from, head);
  to += head, from += head, size -= head;
  for (; size >= 64; size -= 64, to += 64, from += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(to, from, size);
}

}  // namespace

// Copy piece after piece: `sizes[i]` bytes at `from[i]` to `to[i]`. What lies side by side at both
// ends is one piece: the larger the quicker. `streams`: nobody looks at the copy soon.
API void hrt_copy(const char* const* from, char* const* to, const int64_t* sizes, int64_t count,
                  int32_t streams) {
  for (int64_t i = 0; i < count;) {
    const char* source = from[i];
    char* target = to[i];
    int64_t size = sizes[i];
    while (++i < count && from[i] == source + size && to[i] == target + size) size += sizes[i];
    if (streams)
      stream(target, source, static_cast<size_t>(size));
    else
      std::memcpy(target, source, static_cast<size_t>(size));
  }
}

// The pages under the pieces are handed out, and stay as they are: to be written to, or only to be
// read. Where the system knows no such advice nothing happens.
API void hrt_populate(char* const* at, const int64_t* sizes, int64_t count, int32_t writes) {
#ifdef __linux__
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (int64_t i = 0; i < count;) {
    const auto first = reinterpret_cast<uintptr_t>(at[i]);
    uintptr_t end = first + static_cast<uintptr_t>(sizes[i]);
    while (++i < count && reinterpret_cast<uintptr_t>(at[i]) == end)
      end += static_cast<uintptr_t>(sizes[i]);
    const uintptr_t from = first / page * page;
    // MADV_POPULATE_WRITE and MADV_POPULATE_READ, of Linux 5.14.
    if (madvise(reinterpret_cast<void*>(from), end - from, writes ? 23 : 22)) return;
  }
#endif
}

// Send the pieces through a socket that does not block, out of the places where they lie. Returns 0
// or an `errno`.
API int32_t hrt_send(int32_t file, char* const* from, const int64_t* sizes, int64_t count,
                     double seconds) {
  return pass_all(file, true, from, sizes, count, seconds);
}

// The same the other way: what comes goes to its places.
API int32_t hrt_receive(int32_t file, char* const* to, const int64_t* sizes, int64_t count,
                        double seconds) {
  return pass_all(file, false, to, sizes, count, seconds);
}
