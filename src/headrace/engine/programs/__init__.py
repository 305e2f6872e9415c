"""Foreign programs of one server: a queue over all of them, streams, sequences.

Owns: which run begins next and on which lane, measured lengths of runs, the replacement of a
program's process, states between the runs of a sequence. The order and the admission test are
`sched.deadlines`; a program in its process is `programs.confined`. Needs the extra `programs`.

Invariant: every run gets one answer: outputs, or one typed error that says why there are none.
"""
