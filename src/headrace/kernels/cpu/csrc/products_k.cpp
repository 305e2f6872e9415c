// Products of GGUF's K kinds, and of a head in two planes.
#include "coded.h"

HR_CODED(Q4_K)
HR_CODED(Q5_K)
HR_CODED(Q6_K)
HR_PANELS(Q8_0_PLANES)
