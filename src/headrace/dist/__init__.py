"""Owns: the mesh of ranks, collectives, channels between processes.
Takes → gives: messages and tensors of one process → those of another.
Does not know: their content.
Invariant: a lost peer is an error with a name, never a hang.
Where does my change go: communication between processes.
"""
