"""Owns: one file per model family: its keys in both formats, tensor names and structure.
Takes → gives: a config or metadata → an architecture; an architecture → its step graph.
Does not know: files on disk, weights, arrays, backends, batching.
Invariant: reads like the paper; pure description on `base` and `layers` alone.
Where does my change go: a new model family.
"""
