// Blocks of KV between the arrays of the layers and one piece of memory, or another pool: in one
// call, since tens of pieces of a few kilobytes, most of which fall on pages that the system has to
// hand out first, would each take the interpreter's lock again.

#include <cstdint>
#include <cstring>

// Copy piece after piece: `sizes[i]` bytes at `from[i]` to `to[i]`. What lies side by side at both
// ends is one piece: the larger the quicker.
extern "C" __attribute__((visibility("default"))) void hrt_copy(const char* const* from,
                                                                char* const* to,
                                                                const int64_t* sizes,
                                                                int64_t count) {
  for (int64_t i = 0; i < count;) {
    const char* source = from[i];
    char* target = to[i];
    int64_t size = sizes[i];
    while (++i < count && from[i] == source + size && to[i] == target + size) size += sizes[i];
    std::memcpy(target, source, static_cast<size_t>(size));
  }
}
