// The kernels for AVX-512-VNNI.
#define HR_LEVEL 4
#include "kernels.h"
#include "levels.h"

namespace hr {
extern const Kernels k_vnni{"vnni", run, scratch_of, integer_peak, read_stream};
}
