"""`/v1/chat/completions`: messages in, a message out."""
