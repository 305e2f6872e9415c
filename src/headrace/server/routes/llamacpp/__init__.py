"""`/infill` and `/completion` in llama.cpp's shape, for editors that were made for its server."""
