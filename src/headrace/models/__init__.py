"""Owns: one file per model family: structure only.
Takes → gives: an architecture → its step graph.
Does not know: files, weights, arrays, backends, batching.
Invariant: reads like the paper; pure description on `base` and `layers` alone.
Where does my change go: a new model family.
"""
