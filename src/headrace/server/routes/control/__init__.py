"""vLLM's development routes, for an operator: sleep and wake, cache reset, profile."""
