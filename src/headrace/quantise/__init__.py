"""Owns: smaller weights whose loss on a text is minimised: statistics, rounding, formats, state.
Takes → gives: an opened model and token windows → quantised tensors, and the statistics' record.
Does not know: commands, stores, the accuracy gate.
Invariant: the same model, text, recipe and number of threads give the same bytes, also resumed.
Where does my change go: a method in `solve` or `search`, a format in `blocks` or `coded`.
"""
