// The kernels for AVX2.
#define HR_LEVEL 2
#include "kernels.h"
#include "levels.h"

namespace hr {
extern const Kernels k_avx2{"avx2", run, scratch_of, integer_peak, read_stream};
}
