"""Owns: FLOPs and bytes per operator, ceilings, step time, memory plan, calibration, planner.
Takes → gives: architecture, batch and hardware → time, memory and what binds.
Does not know: tensors, files of weights, the server.
Invariant: every figure has its formula in a docstring and its unit in its name.
Where does my change go: what the hardware allows.
"""
