"""Owns: the gateway before several servers: where a request goes, and where it continues.

Takes → gives: HTTP requests → the answers of one of the servers, byte by byte. Does not know:
models, engines, prompts beyond their bytes. Invariant: if a replica dies in mid-stream, its client
reads on without a gap in the text. Where does my change go: a policy is in
`engine/simulator/routing.py`; the end of a replica in `replica.py`.
"""
