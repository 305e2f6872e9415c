"""The health routes of the Open Inference Protocol (KServe v2)."""
