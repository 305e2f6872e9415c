// The kernels for AVX512-BF16 with activations of dense products rounded to bf16.
#define HR_LEVEL 5
#include "rounded_dense.h"

namespace hr {
extern const Kernels k_rounded = named<Rounded>("avx512-bf16");
}
