"""Routes, one folder per endpoint: `route` (path), `schema` (bodies), `serve` (implementation)."""
