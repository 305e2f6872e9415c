// Whether this process may use AMX's tiles for int8.
#pragma once

namespace hr {

// Null: it may, now and on every thread. Otherwise why not, as half a sentence. The first call asks
// the CPU and the system, once for the process; later ones repeat its answer.
const char* tiles_refused();

}  // namespace hr
