"""Owns: the public operators with their shapes, the reference of each, triton/ and cpu/.
Takes → gives: tensors → tensors.
Does not know: models, sequences, the source of weights.
Invariant: row invariance: a row of a result depends on that row alone.
Where does my change go: how an operator is computed.
"""
