"""Compiler launcher of CMakeLists.txt: a cache of objects by the digest of their inputs.

The same command, compiler and sources give the same object. `build/objects` of the checkout keeps
it for later builds in any folder. pip clears its build folder at each install, and an editable
install, a wheel and the tests' libraries share most of their objects. A command other than a plain
compilation runs unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
KEPT = ROOT / "build" / "objects"
MOST = 600
"""Most kept objects, the last used ones. A build of every level makes about fifty."""
PLACES = ("-o", "-MT", "-MF")
"""Options that name outputs, which do not change the object's content."""


def main(command: list[str]) -> int:
    places, rest = parted(command)
    sources = [Path(word) for word in rest if word.endswith(".cpp")]
    if "-c" not in rest or set(places) != set(PLACES) or len(sources) != 1:
        return subprocess.run(command).returncode
    kept = KEPT / key(rest, sources[0])
    made, needs, target = Path(places["-o"]), Path(places["-MF"]), places["-MT"]
    with contextlib.suppress(OSError):  # It is not kept, or another build just removed it.
        shutil.copyfile(kept.with_suffix(".o"), made)
        needs.write_text(said_for(kept.with_suffix(".d").read_text(), target))
        os.utime(kept.with_suffix(".o"))
        return 0
    ended = subprocess.run(command).returncode
    if ended == 0:
        with contextlib.suppress(OSError):  # A folder that cannot be written keeps nothing.
            keep(needs, kept.with_suffix(".d"))
            keep(made, kept.with_suffix(".o"))
            forget()
    return ended


def parted(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command into the places of its outputs and the rest."""
    places: dict[str, str] = {}
    rest: list[str] = []
    words = iter(command)
    for word in words:
        if word in PLACES:
            places[word] = next(words, "")
        else:
            rest.append(word)
    return places, rest


def key(command: list[str], source: Path) -> str:
    """Digest a command, its compiler, its source and all headers in its folder and the include
    folders.

    A compiler is its version text without the name: one build calls it c++, another g++.
    """
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    compiler = version.partition(b" ")[2]
    digest = hashlib.sha256(compiler + "\0".join(command[1:]).encode())
    folders = {source.parent, *(Path(word[2:]) for word in command if word.startswith("-I"))}
    files = [file for folder in sorted(folders) for file in sorted(folder.glob("*.h"))]
    for file in (source, *files):
        digest.update(str(file).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def said_for(needs: str, target: str) -> str:
    """Rewrite the compiler's dependency list (`-MD`) for another name of the object."""
    return f"{target}:{needs.partition(':')[2]}"


def keep(file: Path, kept: Path) -> None:
    """Copy a file into the cache, completely or not at all."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(f"{kept.name}.{os.getpid()}")
    shutil.copyfile(file, part)
    part.replace(kept)


def forget() -> None:
    """Delete the least recently used objects beyond `MOST`."""
    used = sorted((file.stat().st_mtime, file) for file in KEPT.glob("*.o"))
    for _, file in used[:-MOST]:
        file.unlink(missing_ok=True)
        file.with_suffix(".d").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
