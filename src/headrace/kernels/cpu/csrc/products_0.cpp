// Products of GGUF's first kinds of codes.
#include "coded.h"

HR_CODED(Q4_0)
HR_CODED(Q4_1)
HR_CODED(Q5_0)
HR_CODED(Q5_1)
