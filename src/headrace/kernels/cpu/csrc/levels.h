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

// Whether one or two rows ask for the lines of their weights, too, which they read at full speed. An
// Intel processor's prefetcher loses such a stream (family 6, model 207: a step of one row takes 0.6
// of the time by asking), Zen 4's keeps it.
extern const bool lines_are_asked_for;

// Why the AMX level, which serves by name only, cannot serve here: half a sentence; null: it can.
const char* amx_refused();

}  // namespace hr
