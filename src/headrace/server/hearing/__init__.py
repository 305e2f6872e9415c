"""Sounds over HTTP: forms in, transcripts out, and sessions over a websocket.

Imported when a model that hears is served, and not before: it needs numpy.
"""
