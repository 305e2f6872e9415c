"""Routes `/infill` and `/completion` in llama.cpp's format, for editors made for its server."""
