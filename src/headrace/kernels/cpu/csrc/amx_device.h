// The tile functions as AMX instructions.
//
// Written as assembly, not as intrinsics: those of GCC 12 paste the tile's number into the text of
// the instruction as it stands in the source, so that it could not be a template's parameter. For
// the same reason no compiler switch is needed, only an assembler that knows the instructions;
// compilers that allocate tiles do so for their own tile types alone.
#pragma once

namespace {

// Tiles of this thread from here to `tiles_end`, all zero.
HR_INLINE void tiles_begin(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// Back to the initial state: nothing of the tiles is saved when this thread is switched away.
HR_INLINE void tiles_end() { __asm__ volatile("tilerelease" ::: "memory"); }

// Rows of the tile from `base`, `stride` bytes apart.
template <int T>
HR_INLINE void tile_load(const void* base, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(T) : "memory");
}

template <int T>
HR_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}

// C[m][n] += Σ_k A[m][2k] · B[k][2n] + Σ_k A[m][2k + 1] · B[k][2n + 1], each sum a chain of fp32 fma.
template <int kC, int kA, int kB>
HR_INLINE void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

template <int T>
HR_INLINE void tile_store(void* base, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(T) : "memory");
}

}  // namespace
