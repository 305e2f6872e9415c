"""Sounds, pictures and videos that a client sent, decoded in a confined child process.

Owns: the accepted formats, the limits on declared and decoded size, the child processes in which
decoders run. Takes the bytes of a file; gives a sound's fp32 samples at 16 kHz, one channel, a
picture's tiles as a model's processor cuts them, or the frames of a video that it takes.
`writing.py` encodes generated sound as a file. Knows nothing of models or routes. It opens no
file by name; `fetch_child` alone opens connections, to hosts that the operator names.

Invariant: whatever the bytes are, the caller gets samples, tiles or one typed refusal, in bounded
time.

Your change: a format of sounds is a line of `container` in `formats.py` and a reader in `child.py`;
one of pictures a row of `_SIGNATURES` in `pictures.py` and of `PLUGINS` in `picture_child.py`.
"""

from .audio import RATE, AudioLimits, Decoded, Sound, decode, decode_into
from .confined import OnChild
from .fetching import fetch
from .formats import REFUSALS, declared
from .pictures import PICTURE_REFUSALS, Picture, PictureLimits, decode_picture, levels
from .videos import VIDEO_REFUSALS, Video, VideoLimits, decode_video

__all__ = [
    "PICTURE_REFUSALS",
    "RATE",
    "REFUSALS",
    "VIDEO_REFUSALS",
    "AudioLimits",
    "Decoded",
    "OnChild",
    "Picture",
    "PictureLimits",
    "Sound",
    "Video",
    "VideoLimits",
    "declared",
    "decode",
    "decode_into",
    "decode_picture",
    "decode_video",
    "fetch",
    "levels",
]
