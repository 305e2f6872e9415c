"""`/v1/files`: what batches read and write."""
