"""Transcription models in the engine: speech to text, with or without text models next to it.

Owns: the queue of sounds in the engine process (`desk`), whose jobs make requests (`runner`) or run
slices of a network by itself (`frames`), and the front end (`HearingEngine`), a member of
`engine.clients.group` like a text model. Samples go to the process in files of the private folder;
text comes back in messages. Knows nothing of routes, sound files or sessions.
Invariant: a sound ends exactly once, with its text or with one typed error, whatever dies.
Your change: an option of a request is a field of `records.HearOptions`.
"""
