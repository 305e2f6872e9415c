"""One engine: what its start decides, its parts, and the loop that joins them.

Owns: `start` (every "auto" with its reason), `build` (plan, load, allocate, warm up, prove), the
executor's protocol, and `core`: accept → schedule → submit → update → emit.
Does not know: who asks, and in which process a worker runs.
"""
