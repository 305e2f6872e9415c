// The kernels for AVX-512.
#define HR_LEVEL 3
#include "kernels.h"
#include "levels.h"

namespace hr {
extern const Kernels k_avx512{"avx512", run, scratch_of, integer_peak, read_stream};
}
