"""Owns: one file per model family: structure only.
Takes → gives: an architecture and named weights → a forward pass.
Does not know: files, batching, devices.
Invariant: reads like the paper.
Where does my change go: a new model family.
"""
