"""List of the repacked weights in the cache: for `headrace models`, which shows and removes
them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .panelfile import TEMPORARY, describe

FOLDER = "panels"
SUFFIX = ".panels"


@dataclass(frozen=True, slots=True)
class KeptPanels:
    """A file of repacked weights, or an unfinished one of a dead writer."""

    path: Path
    source: Path | None
    """Model file or folder that it was made from; None if the file does not say."""
    nbytes: int


def kept_panels(root: Path) -> list[KeptPanels]:
    """List every file of repacked weights of the cache at `root`."""
    folder = root / FOLDER
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix in (SUFFIX, TEMPORARY) and path.is_file():
            source = (describe(path) or {}).get("source")
            known = Path(source) if isinstance(source, str) else None
            found.append(KeptPanels(path, known, path.stat().st_size))
    return found


def panels_of(folder: Path, root: Path) -> list[KeptPanels]:
    """List the kept panels of a model file, or of all model files below the folder `root`."""
    return [
        kept
        for kept in kept_panels(root)
        if kept.source is not None and kept.source.is_relative_to(folder.resolve())
    ]


def remove_panels(panels: Iterable[KeptPanels]) -> int:
    """Delete them; return the bytes freed, which become free when no process maps them any more."""
    freed = 0
    for kept in panels:
        kept.path.unlink(missing_ok=True)
        freed += kept.nbytes
    return freed
