"""Anthropic's `/v1/messages`, with streaming, and `count_tokens`."""
