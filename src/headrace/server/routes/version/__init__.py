"""`version` routes."""
