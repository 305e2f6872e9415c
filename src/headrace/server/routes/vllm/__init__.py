"""What vLLM's clients and balancers ask beside OpenAI's routes."""
