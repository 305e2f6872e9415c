"""A transcription engine: speech to text in a process of its own, for an event loop.

Owns: the messages about sounds, the process in which `speech`'s jobs run over one loop
(`engine.loop`), and its front end (`HearingEngine`): supervised, restarted and reported like the
text engine. Samples go to it in
files of the private folder, text comes back in messages. Knows nothing of routes, of sound files or
of sessions.
Invariant: a sound ends exactly once, with its text or with one typed error, whatever dies.
Your change: an option of a request is a field of `messages.HearOptions`.
"""
