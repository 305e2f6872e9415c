// The ISA levels that were compiled in, and the choice among them.
#pragma once
#include "work.h"

namespace hr {

extern const Kernels k_neon;
extern const Kernels k_dotprod;
extern const Kernels k_avx2;
extern const Kernels k_avx512;
extern const Kernels k_vnni;
extern const Kernels k_bf16;
extern const Kernels k_amx;           // where the assembler knew it
extern const Kernels k_amx_rounded;   // the same
extern const Kernels k_amx_emulated;  // in test builds

// The table of the best level that this CPU runs; `wish` ("avx2" …) chooses it, null: the best.
// Null when an x86 CPU has not even AVX2, or any not what was wished for.
const Kernels* choose_kernels(const char* wish);

// How this processor likes its weights fetched. `few`: one and two rows, which read at full speed, ask
// for the lines, too. `near`: into L1, else into L2 (of dense weights, those of one and two rows
// alone). Measured: docs/tried/kernels.md.
struct Fetching {
  bool few, near;
};
extern const Fetching fetching;

// Why the AMX level, which serves by name only, cannot serve here: half a sentence; null: it can.
const char* amx_refused();

}  // namespace hr
