"""Engines on virtual time: the real scheduler and KV manager, steps timed by the roofline.

Owns: simulated replicas and the links between them, several models of one server, and the routing
that the gateway shares.
Does not know: devices.
"""
