"""Transcription over HTTP: forms in, transcripts out, and sessions over a websocket.

Imported only if a transcription model is served: it needs numpy.
"""
