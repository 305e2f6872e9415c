"""Well-known models by their published `config.json`, so that one can plan without their files.

Each line of `known.jsonl` is one: its name, the parameters that its makers publish, and its config
as it stands on its page, without images and sounds. A served model is read from its files alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..base.arch import ModelArch
from .config import read_config
from .weights import WeightBytes

_LINES = Path(__file__).with_suffix(".jsonl").read_text().splitlines()
KNOWN: Mapping[str, dict[str, Any]] = {each["name"]: each for each in map(json.loads, _LINES)}
"""Models by name. A name of the catalog stands here for what its makers published, not for the
catalog's file."""


@cache
def known(name: str) -> tuple[ModelArch, WeightBytes]:
    """Return (architecture, formats in which its makers publish it) of a name in `KNOWN`."""
    return read_config(KNOWN[name]["config"])
