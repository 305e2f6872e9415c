"""Routes `/api/*`: Ollama's interface, for its clients and editors, over the same chat and
vectors."""
