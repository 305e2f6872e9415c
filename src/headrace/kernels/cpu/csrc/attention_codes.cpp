// Attention over KV in codes.
#include "attention.h"

namespace hr::HR_NAME {

void attention_codes(const HrAttention& op, const Work& work) { attention<Codes>(op, work); }

}  // namespace hr::HR_NAME
