"""`/rerank`, `/v1/rerank`, `/v2/rerank`."""
