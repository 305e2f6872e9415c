// The kernels for AMX (tiles and bf16), Sapphire Rapids and later.
#include "amx_dense.h"

namespace hr {
extern const Kernels amx::kernels = named<Tiled<2>>("amx");
extern const Kernels amx_rounded::kernels = named<Tiled<1>>("amx-bf16");
}
