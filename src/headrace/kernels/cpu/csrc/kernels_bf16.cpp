// The kernels for AVX-512-VNNI with AVX512-BF16.
#define HR_LEVEL 5
#include "kernels.h"
#include "levels.h"

namespace hr {
extern const Kernels k_bf16{"bf16", run, scratch_of, integer_peak, read_stream};
}
