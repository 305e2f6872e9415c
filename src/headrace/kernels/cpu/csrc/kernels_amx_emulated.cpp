// The same kernels on emulated tiles: in test builds only (HEADRACE_TEST_AMX), and only by name.
#define HR_LEVEL 5
#define HR_TILES_EMULATED 1
#include "kernels_amx.h"

namespace hr {
extern const Kernels k_amx_emulated{"amx-emulated", run<2>, scratch_of, integer_peak, read_stream};
}
