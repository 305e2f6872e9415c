"""One folder per endpoint: `route` (path), `schema` (bodies), `serve` (what it does)."""
