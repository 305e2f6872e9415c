"""Set before anything of Headrace is imported: every step plan is verified in tests."""

from __future__ import annotations

import os

os.environ.setdefault("HEADRACE_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
