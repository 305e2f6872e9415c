"""The version, in the one place from which every package and answer takes it."""

from __future__ import annotations

VERSION = "0.1.0"
