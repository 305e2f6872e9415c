"""`health` routes."""
