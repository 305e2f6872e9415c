// The kernels for aarch64.
#define HR_LEVEL 0
#include "kernels.h"
#include "levels.h"

namespace hr {
extern const Kernels k_neon{"neon", run, scratch_of, integer_peak, read_stream};
}
