// A team of threads that runs whole programs: see team.cpp.
#pragma once
#include "levels.h"

namespace hr {

struct Team;

Team* team_new(int threads, const Kernels* kernels);
void team_free(Team* team);
int team_threads(const Team* team);
const Kernels* team_kernels(const Team* team);

// Run the records in order, every one by all threads, each complete before the next begins.
// `seconds` (one per record) is filled in when it is not null. Returns 0, −1 for no memory, or how
// a meeting with other ranks failed (ranks.h).
int team_run(Team* team, const HrRecord* records, int count, const HrStep* step, double* seconds);

// Run `task(context, thread, threads)` once on every thread.
void team_each(Team* team, void (*task)(void*, int, int), void* context);

}  // namespace hr
