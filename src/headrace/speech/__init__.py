"""Speech to text (features, jobs over long sounds, the networks of Parakeet and Moonshine), and a
codec that turns a language model's codes into samples.

Owns: log-mel features, windows, decoding, words, and networks that transcribe a window by
themselves. Takes samples at 16 kHz; gives segments of text with their times; `codec.py` takes codes
and gives samples. Whisper's jobs yield requests, which their runner gives to an engine. Knows
nothing of sound files (`media`), of routes or of the engine's scheduler. Invariant: a window's text
depends on its samples and options alone, not on others in the step. Your change: a way of decoding
in `decoding.py`; a rule for a token in `worker/time_rules.py`.
"""
