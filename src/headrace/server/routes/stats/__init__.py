"""`/v1/stats`: the last seconds of this server, for the page at `/` and `headrace top`."""
