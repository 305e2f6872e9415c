"""Owns: the CPU kernels in C++ (csrc/), the program that runs a whole step of them, the packed weights.
Takes → gives: operator calls → records; records and a step → hidden states and logits.
Does not know: models, sequences, files of models.
Invariant: a row's bits depend on that row alone, at every ISA level and number of threads alike.
Where does my change go: csrc/ for arithmetic; fusion.py for fusion; csrc/records.h describes records.
"""  # noqa: E501
