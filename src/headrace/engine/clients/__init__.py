"""The engine as its users see it: `LLM` in their process, `AsyncEngine` over a supervised one.

Owns: input and output processing, streams, supervision of the engine's process, records of
requests, and what the API process opens of a model.
Does not know: HTTP.
"""
