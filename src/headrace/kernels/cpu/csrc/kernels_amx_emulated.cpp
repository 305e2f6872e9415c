// The same kernels on emulated tiles: in test builds only (HEADRACE_TEST_AMX), and only by name.
#define HR_LEVEL 5
#define HR_TILES_EMULATED 1
#include "amx_dense.h"

namespace hr {
extern const Kernels k_amx_emulated = named<Tiled<2>>("amx-emulated");
}
