"""Price of a device per hour: examples, to be replaced by the user's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import InvalidRequest
from ..base.foreign import any_json
from .hardware import DEVICES, Hardware

PRICES = {
    "A100": 1.8, "H100": 3.0, "H200": 3.8, "B200": 5.5, "L40S": 1.1, "RTX4090": 0.45,
    "RTX5090": 0.7, "THOR": 0.15, "B300": 6.5, "GB200": 7.0, "GB300": 8.5, "H20": 1.9,
    "MI300X": 2.2, "MI355X": 4.0, "L4": 0.6, "ORIN": 0.08,
}  # fmt: skip
"""Price per device and hour. Of the order of on-demand offers of 2026, to be replaced by the user's
own (`--prices FILE`): a plan is as good as its prices."""


@dataclass(frozen=True, slots=True)
class PriceSource:
    """Currency, date and source of prices."""

    currency: str = "USD"
    date: str = "2026-11"
    source: str = "examples, of the order of on-demand offers; --prices FILE has your own"


WORDS = ("currency", "date", "source")
"""Keys of a price table that are not devices."""


def read_prices(
    path: Path | None, devices: Iterable[Hardware] = tuple(DEVICES.values())
) -> tuple[dict[str, float], PriceSource]:
    """Return the table and its source, with a JSON file of the same form over it; a user's
    `devices` have no other. The file may state its currency, date and source.

    Raises `InvalidRequest` for a file that is no such table and for a device without a price.
    """
    known = {*DEVICES, *(device.name for device in devices)}
    found, told = dict(PRICES), PriceSource()
    if path is not None:
        try:
            data = dict(any_json(path.read_bytes()))
            words = {key: str(data.pop(key))[:80] for key in WORDS if key in data}
            given = {str(key): float(value) for key, value in data.items()}
            told = PriceSource(**{"date": "without a date", "source": path.name} | words)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise InvalidRequest(
                f'{path} is no price table ({error}); it looks like {{"H200": 3.8}}', param="prices"
            ) from None
        wrong = [name for name, value in given.items() if name not in known or not value > 0]
        if wrong:
            raise InvalidRequest(
                f"{path}: {wrong[0]!r} must be one of {', '.join(sorted(known))} with a price "
                "above 0",
                param="prices",
            )
        found |= given
    for device in devices:
        if device.name not in found:
            raise InvalidRequest(
                f"{device.name} has no price per hour: give one in a file, as in "
                f'{{"{device.name}": 3.8}}, with --prices',
                param="prices",
            )
    return found, told
