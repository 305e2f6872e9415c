"""Owns: model → stages → gates → signed profile and evidence.
Takes → gives: a model and options → a folder in which every result is named by its content.
Does not know: the inside of the engine.
Invariant: a kept result is used only if everything that can change it is the same.
Where does my change go: what ships.
"""
