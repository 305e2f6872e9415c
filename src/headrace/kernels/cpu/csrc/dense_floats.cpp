// Products of weights in fp32 and fp16, and the attention of encoders, whose tiles are of fp32 too.
#include "bidirectional.h"
#include "dense.h"

HR_DENSE(F32)
HR_DENSE(F16)
