// A block of KV, from the file's bytes to its places in the arrays of the layers: in one call, since
// tens of pieces of a few kilobytes, most of which fall on pages that the system has to hand out
// first, would each take the interpreter's lock again.

#include <cstdint>
#include <cstring>

// Copy the bytes at `from`, piece after piece: `sizes[i]` bytes to `targets[i]`.
extern "C" __attribute__((visibility("default"))) void hrt_spread(const char* from,
                                                                  char* const* targets,
                                                                  const int64_t* sizes,
                                                                  int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(targets[i], from, static_cast<size_t>(sizes[i]));
    from += sizes[i];
  }
}
