// Products of weights in bf16 and fp8.
#include "dense.h"

HR_DENSE(BF16)
HR_DENSE(E4M3)
