"""`metrics` routes."""
