"""`/score`, `/v1/score`."""
