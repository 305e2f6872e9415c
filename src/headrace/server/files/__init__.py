"""Uploaded files: read from forms, kept in one folder, each visible to its owner only."""
