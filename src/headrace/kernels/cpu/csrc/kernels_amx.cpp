// The kernels for AMX (tiles and bf16), Sapphire Rapids and later.
#define HR_LEVEL 5
#include "amx_dense.h"

namespace hr {
extern const Kernels k_amx = named<Tiled<2>>("amx");
extern const Kernels k_amx_rounded = named<Tiled<1>>("amx-bf16");
}
