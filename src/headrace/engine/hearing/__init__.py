"""An engine that hears: speech to text in a process of its own, for an event loop.

Owns: the messages about sounds, the process that runs `speech`, and its face (`HearingEngine`):
supervised, restarted and told of like the engine of text. Samples go to it in files of the private
folder, text comes back in messages. Knows nothing of routes, of files of sound or of sessions.
Invariant: a sound ends exactly once, with its text or with one typed error, whatever dies.
Your change: what a request may ask for is a field of `messages.HearOptions`.
"""
