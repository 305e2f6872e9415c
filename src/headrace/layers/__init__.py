"""Owns: building blocks of models: attention, feed-forward, norms, embedding, head.
Takes → gives: named weights → modules that call operators.
Does not know: whole models, files, batching.
Invariant: no arithmetic of its own: only operators and views.
Where does my change go: a block that two models share.
"""
