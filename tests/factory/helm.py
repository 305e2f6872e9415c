"""Charts rendered by Helm: its command where it is installed, else its library from PyPI."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

COMMAND = shutil.which("helm")


def rendered(
    chart: Path, *settings: str, words: tuple[str, ...] = (), namespace: str = "default"
) -> list[dict[str, Any]]:
    """The documents of a release `river`. `settings`: as `--set` takes them; `words`: more of the
    command's, which the library does not have."""
    yaml = pytest.importorskip("yaml")
    if COMMAND is not None:
        asked = (COMMAND, "template", "river", str(chart), "--namespace", namespace, *words)
        asked += tuple(word for one in settings for word in ("--set", one))
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        return [document for document in yaml.safe_load_all(done.stdout) if document]
    library = pytest.importorskip("helm_python.chart")
    if words:
        pytest.skip("Helm's command is not installed, and its library has no version to set")
    with library.Chart.load(chart) as loaded:
        given = set_values(settings)
        loaded.validate_schema(given)
        texts = loaded.render(given, name="river", namespace=namespace)
    found = [one for text in texts.values() for one in yaml.safe_load_all(text)]
    return [document for document in found if document]


def linted(chart: Path) -> list[str]:
    """The warnings and errors of `helm lint`, by Helm's library."""
    library = pytest.importorskip("helm_python.chart")
    report = library.lint(str(chart), strict=True)
    return [one["error"] for one in report["messages"] if one["severity"] > 1] + report["errors"]


def set_values(settings: tuple[str, ...]) -> dict[str, Any]:
    """Values of settings `a.b[0].c=1`, as Helm's `--set` reads them."""
    made: dict[str, Any] = {}
    for one in settings:
        path, _, text = one.partition("=")
        steps: list[Any] = []
        for part in re.split(r"(?<!\\)\.", path):
            name, *places = part.replace("\\.", ".").split("[")
            steps += [name, *(int(place.rstrip("]")) for place in places)]
        here: Any = made
        for step, then in zip(steps, [*steps[1:], None], strict=True):
            empty: Any = _value(text) if then is None else [] if isinstance(then, int) else {}
            if isinstance(step, int):
                here += [None] * (step + 1 - len(here))
                here[step] = empty if here[step] is None else here[step]
            else:
                here.setdefault(step, empty)
            here = here[step]
    return made


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
    return int(text) if re.fullmatch(r"0|-?[1-9]\d*", text) else text
