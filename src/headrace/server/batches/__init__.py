"""Batches: the requests of a file, run at the lowest priority, across restarts."""
