"""Owns: the blocks of models: attention, feed-forward, norms, embedding, head.
Takes → gives: an architecture, values and names of weights → nodes of a step graph.
Does not know: weights, arrays, backends, whole models.
Invariant: pure description on `base` alone.
Where does my change go: a block that two models share.
"""
