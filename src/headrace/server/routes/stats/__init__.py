"""Route `/v1/stats`: the last minutes of this server, for the page at `/` and `headrace top`."""
