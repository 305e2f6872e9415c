"""Owns: load generation, metrics, reports, comparisons.
Takes → gives: a server's address and a workload → a report.
Does not know: the engine: it reaches servers over HTTP only.
Invariant: latency counts from the planned send time; a bad client invalidates its own run.
Where does my change go: a workload, an arrival process, a metric, a report.
"""
