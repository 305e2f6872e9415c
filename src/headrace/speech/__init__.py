"""Speech to text: Whisper's files, features, network, decoding, and the walk through a long sound.

Owns: reading CTranslate2's and Hugging Face's files of Whisper, the log-mel features, encoder and
decoder as records of the CPU library, the rules of what may be said next, windows and words. Takes
samples at 16 kHz; gives segments of text with their times. Knows nothing of files of sound
(`media`), of routes or of the engine's scheduler.
Invariant: a window's text depends on its samples and options alone, whoever else is in the step.
Your change: a rule of decoding in `rules.py`; another network beside `network.py`.
"""
