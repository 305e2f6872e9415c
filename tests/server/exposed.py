"""Samples of a server's `/metrics`, read for the soaks."""

from __future__ import annotations

import re


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of the samples `name` that have these labels. Fails where there is none: a wrong name
    must not look like a count of nothing."""
    found = []
    for line in text.splitlines():
        named, _, value = line.rpartition(" ")
        said = dict(re.findall(r'(\w+)="([^"]*)"', named))
        if named.partition("{")[0] == name and said.items() >= labels.items():
            found.append(float(value))
    assert found, f"there is no metric {name} with {labels}"
    return sum(found)
