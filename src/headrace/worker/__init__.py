"""Owns: one process, one device: rows and their features, steps, KV tensors. Takes → gives: step
plans → step results. Does not know: queues, text, HTTP. Invariant: a row is permanent between
admission and release. Where does my change go: what happens on the device in a step."""

from .options import WorkerOptions
from .worker import Worker

__all__ = ["Worker", "WorkerOptions"]
