"""Owns: the gateway before several servers: where a request goes, and where it goes on.
Takes → gives: HTTP requests → the answers of one of the servers, byte by byte.
Does not know: models, engines, prompts beyond their bytes.
Invariant: a client that was answered by a dead replica reads on without a gap in its text.
Where does my change go: a policy is in `engine/routing.py`; what ends a replica in `replica.py`.
"""
