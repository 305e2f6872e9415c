"""Helpers of the tests of the data plane: small random models, and what transformers says."""
