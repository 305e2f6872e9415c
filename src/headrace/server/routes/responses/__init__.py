"""OpenAI's `/v1/responses`: events, stored conversations, background work, cancel."""
