"""`/v1/batches`: many requests in a file, done beside the others."""
