"""Compiler launcher of CMakeLists.txt that keeps objects by what they are made of.

An object is that of the same command, compiler and sources: `build/objects` of the checkout has it
for every later build, wherever that lies. pip clears the folder of a build at each install, and an
editable install, a wheel and the tests' libraries have most of their objects in common. A command
that is no plain compilation runs as it is.
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
"""Objects that are kept, the last used ones. A build of every level takes about fifty."""
PLACES = ("-o", "-MT", "-MF")
"""Options that say where something goes, and change nothing in it but a name."""


def main(command: list[str]) -> int:
    places, rest = parted(command)
    sources = [Path(word) for word in rest if word.endswith(".cpp")]
    if "-c" not in rest or set(places) != set(PLACES) or len(sources) != 1:
        return subprocess.run(command).returncode
    kept = KEPT / key(rest, sources[0])
    made, needs, target = Path(places["-o"]), Path(places["-MF"]), places["-MT"]
    with contextlib.suppress(OSError):  # not kept, or just forgotten by another build
        shutil.copyfile(kept.with_suffix(".o"), made)
        needs.write_text(said_for(kept.with_suffix(".d").read_text(), target))
        os.utime(kept.with_suffix(".o"))
        return 0
    ended = subprocess.run(command).returncode
    if ended == 0:
        with contextlib.suppress(OSError):  # a folder that cannot be written keeps nothing
            keep(needs, kept.with_suffix(".d"))
            keep(made, kept.with_suffix(".o"))
            forget()
    return ended


def parted(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """Part a command into where its results go and the rest."""
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
    """Digest a command, its compiler, its source and all headers beside that and in its folders.

    A compiler is what it says of itself behind its name: one build calls it c++, another g++.
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
    """Rewrite the compiler's list of an object's sources (`-MD`) for another name of the object."""
    return f"{target}:{needs.partition(':')[2]}"


def keep(file: Path, kept: Path) -> None:
    """Copy a file to where it is kept, whole or not at all."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(f"{kept.name}.{os.getpid()}")
    shutil.copyfile(file, part)
    part.replace(kept)


def forget() -> None:
    """Delete the objects beyond `MOST` that were used least recently."""
    used = sorted((file.stat().st_mtime, file) for file in KEPT.glob("*.o"))
    for _, file in used[:-MOST]:
        file.unlink(missing_ok=True)
        file.with_suffix(".d").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
