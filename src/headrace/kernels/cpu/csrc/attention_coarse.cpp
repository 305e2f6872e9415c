// The same with queries and weights of eight bits (code_rows.h).
#include "attention.h"

namespace hr::HR_NAME {

void attention_coarse(const HrAttention& op, const Work& work) { attention<Codes, true>(op, work); }

}  // namespace hr::HR_NAME
