// The kernels for AVX512-BF16 with activations of dense products rounded to bf16.
#include "rounded_dense.h"

namespace hr {
extern const Kernels rounded::kernels = named<Rounded>("avx512-bf16");
}
