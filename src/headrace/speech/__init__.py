"""Speech to text (Whisper's files, features, network, decoding, jobs over long sounds), and a codec
that turns a language model's codes into samples.

Owns: readers of CTranslate2's and Hugging Face's files of Whisper, log-mel features, encoder and
decoder as records of the CPU library, decoding rules, windows and words. Takes samples at 16 kHz;
gives segments of text with their times; `codec.py` takes codes and gives samples. Knows nothing of
sound files (`media`), of routes or of the engine's scheduler. Invariant: a window's text depends on
its samples and options alone, not on others in the step. Your change: a rule of decoding in
`rules.py`; another network next to `network.py`.
"""
