"""Phonemes of a text, by the program espeak-ng.

A text is untrusted: it goes to the program only as standard input, without the characters that
espeak-ng reads as commands. Before that, the program's memory and time are limited, and it can
neither write files nor start processes. Its output is bounded.

The program prints no punctuation, and a line for each clause by its own rules. So clauses are sent
as paragraphs, separated by a marker paragraph. The marker also comes first, which shows its
phonemes.
"""

from __future__ import annotations

import os
import re
import resource
import selectors
import shutil
import subprocess
import time
import unicodedata
from collections.abc import Callable
from contextlib import suppress

from ..base.errors import EngineFault, InvalidRequest, PackageAbsent
from .sentences import clauses

PROGRAM = "espeak-ng"
LANGUAGE = re.compile(r"[a-z]{2,8}(?:[-_+][A-Za-z0-9]{1,12}){0,4}")
"""Names of the program's voices, such as en-us. Only these reach its command line."""
SECONDS = 10
"""Time limit of a piece, both of processor and clock."""
MEMORY = 512 << 20
"""Most bytes of address space."""
MOST_SAID = 1 << 18
"""Most bytes of phonemes."""
OnChild = Callable[["subprocess.Popen[bytes]"], None]
_BETWEEN = "[[tStStS]]"
_OTHER = re.compile(r"\([a-z-]{2,12}\)")
"""Marks of words in another language."""


def phonemes(text: str, language: str, *, on_child: OnChild | None = None) -> str:
    """Return the phonemes of a piece in IPA, with its marks. `on_child` gets the process, which
    another thread may kill.

    Raises `PackageAbsent` without the program, `InvalidRequest` for a text that takes too long,
    `EngineFault` if it fails otherwise.
    """
    found = clauses(_plain(text))
    if not found:
        return ""
    asked = f"\n\n{_BETWEEN}\n\n".join(["", *(clause for clause, _ in found)])
    said = [_OTHER.sub("", line).strip() for line in _answer(asked, language, on_child)]
    said = [line for line in said if line]
    mark = said[0] if said else ""
    groups: list[list[str]] = [[]]
    for line in said[1:]:
        if line == mark:
            groups.append([])
        else:
            groups[-1].append(line)
    ends = [end for _, end in found]
    if not mark or len(groups) != len(ends):  # A clause is affected by the mark after it.
        spoken = [line for line in said if line != mark]
        groups, ends = [[line] for line in spoken], ["," for _ in spoken[1:]] + ends[-1:]
    pairs = zip((" ".join(group) for group in groups), ends, strict=False)
    return " ".join(line + end for line, end in pairs if line)


def _plain(text: str) -> str:
    """Remove from a text what the program reads as commands: control characters, and phonemes in
    double brackets."""
    kept = (" " if unicodedata.category(one)[0] in "CZ" else one for one in text)
    return re.sub(r"\[+", "[", "".join(kept))


def _answer(text: str, language: str, on_child: OnChild | None) -> list[str]:
    """Return the lines that the program prints."""
    assert LANGUAGE.fullmatch(language)
    path = shutil.which(PROGRAM)
    if path is None:
        raise PackageAbsent(
            f"texts become phonemes by the program {PROGRAM}, which is not installed: apt install "
            f"{PROGRAM}, dnf install {PROGRAM} or brew install {PROGRAM}; or send phonemes"
        )
    command = [path, "-q", "--ipa", "-b", "1", "-v", language, "--stdin"]
    end = time.monotonic() + SECONDS
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
        cwd="/",
        # Python ignores SIGXFSZ: a sound-card library that may not write then continues without.
        restore_signals=False,
    ) as child:
        try:
            _limit(child.pid)
            if on_child is not None:
                on_child(child)
            said = _said(child, text.encode("utf-8", "replace"), end)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise EngineFault(f"{PROGRAM} -v {language} has ended with status {child.returncode}")
    return said.decode("utf-8", "replace").splitlines()


def _limit(process: int) -> None:
    """Take from a process, before it reads anything, all rights that it does not need."""
    if hasattr(resource, "prlimit"):
        for limit, value in (
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_CPU, SECONDS),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            with suppress(OSError, ValueError):
                resource.prlimit(process, limit, (value, value))


def _said(child: subprocess.Popen[bytes], text: bytes, end: float) -> bytes:
    """Send the text and return the output. Raises `InvalidRequest` if it is too long or takes too
    long."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        # A piece fits into a pipe's buffer, so this does not wait.
        child.stdin.write(text)
        child.stdin.close()
    said = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            left = end - time.monotonic()
            if left <= 0 or not ready.select(left) or len(said) > MOST_SAID:
                raise InvalidRequest(
                    f"{PROGRAM} does not get done with {text[:40]!r}…: allowed are {SECONDS} s and "
                    f"{MOST_SAID:,} bytes of phonemes",
                    param="input",
                )
            if not (part := os.read(child.stdout.fileno(), 1 << 16)):
                child.wait(max(0.1, end - time.monotonic()))
                return bytes(said)
            said += part
