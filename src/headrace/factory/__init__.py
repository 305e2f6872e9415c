"""Owns: model → package → gates → evidence.
Takes → gives: a model and a profile → a tested container and its chart.
Does not know: the inside of the engine.
Invariant: nothing is published that did not pass its gates.
Where does my change go: what ships.
"""
