// Attention over KV in fp32, fp16 and bf16.
#include "attention.h"

namespace hr::HR_NAME {

void attention_floats(const HrAttention& op, const Work& work) {
  if (op.kv.kind == HR_BF16) attention<Pairs>(op, work);
  else attention<Floats>(op, work);
}

}  // namespace hr::HR_NAME
