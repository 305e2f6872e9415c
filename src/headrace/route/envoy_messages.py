"""Messages of Envoy's external processing.

Only the fields needed to pick an endpoint are described, because Envoy's files import a hundred
others. Numbers are those of `envoy/service/ext_proc/v3/external_processor.proto`. Each part of a
request is declared as bytes.
"""

from __future__ import annotations

from pathlib import Path

from ..base.protobuf import MessageTypes
from ..base.sections import read_rows

_FIELDS = dict(read_rows(Path(__file__).with_suffix(".txt"), lambda row: row.split(": ")))
"""Fields of each message."""
TYPES = MessageTypes("envoy", _FIELDS, "endpoint pickers")
new, parsed = TYPES.new, TYPES.parsed
