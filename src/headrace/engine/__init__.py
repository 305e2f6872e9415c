"""Owns: the loop, the executors, input and output processing, blocking and asyncio faces.
Takes → gives: prompts → text.
Does not know: HTTP.
Invariant: accept → schedule → submit → update → emit, in one loop.
Where does my change go: how the planes are joined.
"""
