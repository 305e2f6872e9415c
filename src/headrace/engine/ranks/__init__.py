"""Executors whose workers run in processes of their own: one, or the ranks of a layout.

Owns: `worker_process`, the channels to it, and the rendezvous of ranks on one host, by a launcher's
environment, or placed by Ray.
Does not know: requests.
"""
