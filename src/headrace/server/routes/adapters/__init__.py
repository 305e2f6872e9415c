"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""
