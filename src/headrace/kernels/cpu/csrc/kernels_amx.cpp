// The kernels for AMX (tiles and bf16), Sapphire Rapids and later.
#define HR_LEVEL 5
#include "kernels_amx.h"

namespace hr {
extern const Kernels k_amx{"amx", run<2>, scratch_of, integer_peak, read_stream};
extern const Kernels k_amx_rounded{"amx-bf16", run<1>, scratch_of, integer_peak, read_stream};
}
