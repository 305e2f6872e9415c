"""Owns: metrics table, request spans, logs, step timeline.
Takes → gives: events and statistics of the engine → metric families, log lines, trace files.
Does not know: how a step is scheduled or computed.
Invariant: observing changes nothing: every call is cheap, bounded and cannot raise into its caller.
Where does my change go: a new metric, log field or span.
"""
