"""The page at `/`: a playground and a live view. Static files, no build step, no third party."""
