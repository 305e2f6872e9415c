"""`/v1/ranking`: NIM's rerank."""
