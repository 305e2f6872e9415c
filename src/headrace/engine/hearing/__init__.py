"""Transcription models in the engine: speech to text beside, or without, models of text.

Owns: the queue of sounds in the engine process (`desk`), whose jobs make requests (`runner`) or run
slices of a network by itself (`frames`), and the front end (`HearingEngine`), a member of
`engine.clients.group` like one of text. Samples go to the process in files of the private folder,
text comes back in messages. Knows nothing of routes, of sound files or of sessions.
Invariant: a sound ends exactly once, with its text or with one typed error, whatever dies.
Your change: an option of a request is a field of `records.HearOptions`.
"""
