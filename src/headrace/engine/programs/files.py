"""Files of programs by the names that a user gives: catalog names, or paths of .onnx files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...base.errors import ModelNotFound, OptionError
from ...base.names import nearest
from ...loader import Progress
from ...loader.catalog import CATALOG
from ...loader.open import fetched

SUFFIX = ".onnx"
_UNNAMED = re.compile(r"[^A-Za-z0-9._-]+")


def is_program(name: str) -> bool:
    """Tell whether a name is that of a program: of the catalog, or a path that ends in .onnx."""
    return name.endswith(SUFFIX) or (name in CATALOG and CATALOG[name].task == "program")


def program_files(
    names: Sequence[str],
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Mapping[str, Path]:
    """Return the file of each program by the name under which it is served; download it if needed.

    A catalog name of several files gives a program for each, as in ocr-pp-v4-det. Raises
    `ModelNotFound`, `DownloadError`, and `OptionError` if two have one name.
    """
    found: dict[str, Path] = {}
    for name in names:
        for served, path in _files(name, cache_dir, offline, progress):
            if served in found:
                why = f"{path} and {found[served]} would both be served as {served}"
                raise OptionError(why, param="programs")
            found[served] = path
    return found


def program_licences(names: Sequence[str]) -> dict[str, str]:
    """Return the licences of the catalog's programs by the names under which they are served."""
    return {
        served: CATALOG[name].licence
        for name in names
        if name in CATALOG
        for served, _ in _served(name, Path())
    }


def _files(
    name: str, cache_dir: str | Path | None, offline: bool, progress: Progress | None
) -> list[tuple[str, Path]]:
    if name.endswith(SUFFIX):
        path = Path(name).expanduser()
        return [(_UNNAMED.sub("-", path.stem).strip("-.") or "program", path)]
    programs = [one.name for one in CATALOG.values() if one.task == "program"]
    if name not in programs:
        raise ModelNotFound(
            f"no program {name!r:.200}; it is a catalog name ({', '.join(programs)}) or the path "
            f"of an {SUFFIX} file{nearest(name, programs)}",
            param="programs",
        )
    return _served(name, fetched(name, cache_dir=cache_dir, offline=offline, progress=progress))


def _served(name: str, folder: Path) -> list[tuple[str, Path]]:
    """Return the files of a catalog name by the names that they are served under."""
    paths = [one.path for one in CATALOG[name].files if one.path.endswith(SUFFIX)]
    if len(paths) == 1:
        return [(name, folder / paths[0])]
    return [(f"{name}-{Path(one).stem}", folder / one) for one in paths]
