"""Owns: the loop, the executors, input and output processing, blocking and asyncio clients.
Takes → gives: prompts → text.
Does not know: HTTP.
Invariant: accept → schedule → submit → update → emit, in one loop.
Where does my change go: to `clients` (`LLM`, `AsyncEngine`, a request's way in and out), `loop`
(start, parts, steps), `ranks` (workers in processes of their own), `hearing` (transcription),
`programs` (foreign programs) or `simulator` (virtual time); here is the engine's own process.
"""
