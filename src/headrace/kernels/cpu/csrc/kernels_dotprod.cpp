// The kernels for aarch64 with dot product (Armv8.2's option).
#define HR_LEVEL 1
#include "kernels.h"
#include "levels.h"

namespace hr {
extern const Kernels k_dotprod{"dotprod", run, scratch_of, integer_peak, read_stream};
}
