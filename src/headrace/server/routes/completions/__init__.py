"""`/v1/completions`: text in, text out."""
