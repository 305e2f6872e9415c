"""Owns: HTTP: routes, schemas, limits, health.
Takes → gives: HTTP requests → engine requests → HTTP answers.
Does not know: torch, schedulers, kernels.
Invariant: every request gets exactly one answer.
Where does my change go: a route.
"""
