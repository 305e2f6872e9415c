"""Owns: the public types, the contract between the planes, the options, the errors.
Takes → gives: plain values → plain values.
Does not know: torch, files (but for reading the environment and the machine), any other package.
Invariant: everything here is data with its rules; no behaviour that could fail at run time.
Where does my change go: a type that two packages share.
"""
