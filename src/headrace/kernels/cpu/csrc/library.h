// The functions of the library: Python declares them to ctypes from these lines (base/c_header.py).
#pragma once
#include "records.h"

#define HR_API extern "C" __attribute__((visibility("default")))

// A digest of all sources of the kernels, made by the build.
HR_API const char* hr_sources();

// Name of the level that `wish` (null: the best) selects on this CPU, or null.
HR_API const char* hr_level(const char* wish);

// Why a level does not serve: 0, it does; 1, it was not built; 2, this CPU lacks it; 3, there is none
// of that name.
HR_API int32_t hr_level_state(const char* name);

// The levels that were built, with blanks between them.
HR_API const char* hr_built();

// Why the AMX level is not the best here, as half a sentence.
HR_API const char* hr_amx_refused();

HR_API void* hr_team_new(int32_t threads, const char* wish);
HR_API void hr_team_free(void* team);
HR_API int32_t hr_team_threads(void* team);

// `seconds`, one per record, or null: see team.h, also for what is returned.
HR_API int32_t hr_run(void* team, const HrRecord* records, int32_t count, const HrStep* step,
                      double* seconds);

// Wait at a fence for the other ranks: 0, or why not (ranks.h).
HR_API int32_t hr_meet(void* fence, int32_t ranks, uint32_t sign);

// From now on the ranks of a fence, which this process has for itself, meet by sockets (wire.h).
HR_API void hr_wire(void* fence, int32_t ranks, int32_t rank, int32_t stages,
                    const int32_t* sockets);

// The rank at which a fence's wire broke; -1: it did not.
HR_API int32_t hr_wire_culprit(void* fence);
HR_API void hr_wire_free(void* fence);

// Bytes of a packed weight, or −1 when the kind or the shape has no panels.
HR_API int64_t hr_packed_bytes(int32_t kind, int64_t out, int64_t in);

HR_API void hr_pack(void* team, int32_t kind, const uint8_t* rows, int64_t row_bytes, int64_t out,
                    int64_t in, uint8_t* target);

// The same of codes: see pack.h.
HR_API void hr_pack_coded(void* team, int32_t kind, const uint8_t* codes, const void* scales,
                          const uint8_t* zeros, int64_t group, int64_t out, int64_t in,
                          uint8_t* target);

// `count` numbers of a dense kind as blocks of another; 1: some have no scale.
HR_API int32_t hr_encode(void* team, int32_t kind, int32_t type, const void* numbers,
                         int64_t count, uint8_t* out);

// The scales alone, of groups of `size` numbers; likewise.
HR_API int32_t hr_symmetric(void* team, const float* numbers, int64_t count, int32_t size,
                            int32_t half, float* scales);

// Bytes a second of one read of `data` by the whole team.
HR_API double hr_probe_read(void* team, const uint8_t* data, int64_t bytes);

// int8 operations a second of the whole team on registers.
HR_API double hr_probe_int8(void* team, int64_t iterations);

// Memory for weights: zeroed, huge pages where the system gives them. Null when there is none.
HR_API void* hr_alloc(int64_t bytes);
HR_API void hr_release(void* data, int64_t bytes);
