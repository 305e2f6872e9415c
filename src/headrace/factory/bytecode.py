"""Python's bytecode for a layer, the same from every builder.

The image's root is read-only, so anything not compiled in advance would be compiled at every start.
The base's own Python compiles, run from a folder by its own loader. It writes marshal's second
version: later ones mark objects that happen to be referenced twice in the process. The header turns
off the comparison with the source.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ..base.errors import ModelFileError
from .layer import Entry

COMPILE = r"""
import _imp, importlib._bootstrap_external as form, marshal, os, sys
for path in sys.stdin.read().split("\0"):
    with open(path, "rb") as file:
        source = file.read()
    try:
        code = compile(source, "/" + path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        continue  # Templates and the like, which nobody imports.
    head = form.MAGIC_NUMBER + b"\1\0\0\0" + _imp.source_hash(form._RAW_MAGIC_NUMBER, source)
    with open(path + "c", "wb") as file:
        file.write(head + marshal.dumps(code, 2))
"""
SELDOM = {"f2py", "lexers", "lib2to3", "pydoc_data", "test", "tests"}
"""Folders that no server imports, a sixth of all."""
LOADERS = {
    "x86_64": "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    "aarch64": "lib/aarch64-linux-gnu/ld-linux-aarch64.so.1",
}


def unpacked(entries: Mapping[str, Entry], root: Path) -> None:
    """Write a layer's files and links below a folder."""
    for name, entry in entries.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.read is not None:
            path.write_bytes(entry.read())
            path.chmod(entry.mode)
        elif entry.link:
            path.unlink(missing_ok=True)
            path.symlink_to(entry.link)


def compiled(
    entries: Mapping[str, Entry], python: Path, version: str, work: Path
) -> dict[str, Entry]:
    """Add the bytecode of each source that compiles; return all entries.

    `python`: folder with a layer that has Python of this version, for this machine; `work`: an
    empty folder. Raises `ModelFileError` if it does not run.
    """
    sources = {
        name: one
        for name, one in entries.items()
        if name.endswith(".py") and one.read and not SELDOM.intersection(name.split("/"))
    }
    unpacked(sources, work)
    machine = os.uname().machine
    loader = python / LOADERS.get(machine, "none")
    libraries = f"{python}/lib/{machine}-linux-gnu:{python}/usr/lib/{machine}-linux-gnu"
    words = [str(loader), "--library-path", libraries, f"{python}/usr/bin/python{version}"]
    environment = {"PYTHONHOME": f"{python}/usr", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
    try:
        subprocess.run(
            [*words, "-B", "-s", "-S", "-W", "ignore", "-c", COMPILE],
            input="\0".join(sorted(sources)),
            cwd=work,
            env=environment,
            text=True,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise ModelFileError(f"the image's Python does not run on this machine: {said}") from None
    found = dict(entries)
    for name in sources:
        made = work / f"{name}c"
        if made.is_file():
            path = PurePosixPath(name)
            target = (
                path.parent / "__pycache__" / f"{path.stem}.cpython-{version.replace('.', '')}.pyc"
            )
            found[str(target)] = Entry(made.read_bytes().__bytes__)
    return found
