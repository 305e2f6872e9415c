// Products of codes of eight bits and of what is not GGUF's.
#include "coded.h"

HR_CODED(Q8_0)
HR_CODED(MXFP4)
HR_CODED(INT4)
HR_CODED(INT8)
HR_CODED(NVFP4)
HR_CODED(IQ4_NL)
HR_CODED(IQ4_XS)
