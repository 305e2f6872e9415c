"""Owns: number formats: scheme = parameters, load, apply.
Takes → gives: bytes of a foreign format → layouts of `kernels.weights`.
Does not know: models, files.
Invariant: no loss beyond the format's own.
Where does my change go: a new weight format.
"""
