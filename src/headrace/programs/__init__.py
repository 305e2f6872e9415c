"""Foreign programs: ONNX files that are inspected, loaded within bounds and run.

Owns: the readers of their formats, limits, the confined first load, random nodes as draws from a
seed, state tensors, measured prices, the proof that rows may go together. Takes arrays by name,
gives arrays by name. Knows nothing of requests, routes, queues or other programs: whoever owns a
`ForeignProgram` decides when it runs. Needs the extra `programs` (onnxruntime) only to load.

Invariant: the outputs depend on the file, the inputs and the seed alone, bit for bit, alone or
together with other rows; whatever a file holds, the caller gets a program or one typed refusal.

Your change: an operator that must not run is a row of `REFUSED` in `inspection.py`; another format
is a case of `files.only_onnx` and a runner with the methods of `ForeignProgram`.
"""

from .inspection import Inspection, ProgramLimits, inspected
from .runner import ForeignProgram

__all__ = ["ForeignProgram", "Inspection", "ProgramLimits", "inspected"]
