// The same kernels on emulated tiles: in test builds only (HEADRACE_TEST_AMX), and only by name.
#define HR_TILES_EMULATED 1
#include "amx_dense.h"

namespace hr {
extern const Kernels amx_emulated::kernels = named<Tiled<2>>("amx-emulated");
}
