"""Batches: the requests of a file, done at the lowest priority, over restarts."""
