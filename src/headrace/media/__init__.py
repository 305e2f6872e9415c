"""Sound files that a client sent, decoded in a confined child process.

Owns: the accepted formats, the limits on declared and decoded size, the child process in which
decoders run. Takes the bytes of a file; gives fp32 samples at 16 kHz, one channel. `writing.py`
encodes generated sound as a file. Knows nothing of models, routes or URLs: it opens no file by name
and no connection.

Invariant: whatever the bytes are, the caller gets samples or one typed refusal, in bounded time.

Your change: a format is a row of `SIGNATURES` in `formats.py` and a reader in `child.py`.
"""

from .audio import RATE, AudioLimits, Decoded, OnChild, Sound, decode, decode_into
from .formats import REFUSALS, declared

__all__ = [
    "RATE",
    "REFUSALS",
    "AudioLimits",
    "Decoded",
    "OnChild",
    "Sound",
    "declared",
    "decode",
    "decode_into",
]
