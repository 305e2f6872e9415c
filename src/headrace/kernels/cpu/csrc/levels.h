// The ISA levels that were compiled in, and the choice among them.
#pragma once
#include "work.h"

namespace hr {

// Each where it was compiled in.
#define HR_LEVEL_OF(name) \
  namespace name {        \
  extern const Kernels kernels; \
  }
HR_LEVEL_OF(neon) HR_LEVEL_OF(dotprod)
HR_LEVEL_OF(avx2) HR_LEVEL_OF(avx512) HR_LEVEL_OF(vnni) HR_LEVEL_OF(bf16)
HR_LEVEL_OF(rounded) HR_LEVEL_OF(amx) HR_LEVEL_OF(amx_rounded)
HR_LEVEL_OF(amx_emulated)  // in test builds
#undef HR_LEVEL_OF

// The table of the best level that was built and runs here; `wish` ("avx2" …) chooses it, null: the
// best. Null when there is none.
const Kernels* choose_kernels(const char* wish);

// Why a level does not serve.
enum LevelState { kServes, kNotBuilt, kNotHere, kNoLevel };
LevelState state_of(const char* name);

// The names of those that were built, each with a blank behind it.
extern const char* const built_levels;

// How this processor likes its weights fetched. `few`: one and two rows, which read at full speed, ask
// for the lines, too. `near`: into L1, else into L2 (of dense weights, those of one and two rows
// alone). `coded`: most rows that meet codes in registers, twelve at a time; more meet decoded ones
// (panel_pairs.h). Measured: docs/tried/kernels.md.
struct Fetching {
  bool few, near;
  int coded;
};
extern const Fetching fetching;

// Why the AMX level, which serves by name only, cannot serve here: half a sentence; null: it can.
const char* amx_refused();

}  // namespace hr
