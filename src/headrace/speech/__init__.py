"""Speech to text (Whisper's files, features, network, decoding, the walk through a long sound), and
a codec's samples from the codes that a language model writes.

Owns: reading CTranslate2's and Hugging Face's files of Whisper, the log-mel features, encoder and
decoder as records of the CPU library, the rules of what may be said next, windows and words. Takes
samples at 16 kHz; gives segments of text with their times; `codec.py` takes codes and gives
samples. Knows nothing of files of sound
(`media`), of routes or of the engine's scheduler.
Invariant: a window's text depends on its samples and options alone, whoever else is in the step.
Your change: a rule of decoding in `rules.py`; another network beside `network.py`.
"""
