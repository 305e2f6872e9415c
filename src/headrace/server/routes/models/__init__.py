"""`models` routes."""
