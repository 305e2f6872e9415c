"""Owns: model → package → gates → evidence. What stands is the graph of stages and its store.
Takes → gives: stages and their recipes → a folder in which every result is named by its content.
Does not know: the inside of the engine.
Invariant: a kept result is used only where all that can change it is the same.
Where does my change go: what ships.
"""
