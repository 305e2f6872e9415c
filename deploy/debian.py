"""Writes `src/headrace/factory/debian.json`: the packages of the image's base, by their digests.

    python deploy/debian.py [http://MIRROR/]

Python and the libraries that it and the kernels load, for both architectures, as Debian's lists
have them today, from this machine's mirror or from an address. Who runs it anew reads the
difference, and builds and tries the image.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from headrace.factory.image import own_mirror

OUT = Path(__file__).parent.parent / "src" / "headrace" / "factory" / "debian.json"
MIRROR = sys.argv[1] if len(sys.argv) > 1 else own_mirror()
LISTS = [("debian", "bookworm"), ("debian-security", "bookworm-security")]
PACKAGES = """python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1
    libstdc++6 libexpat1 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1
    libncursesw6 libtinfo6 libreadline8 libdb5.3 libcrypt1 media-types tzdata"""
CUDA = """gcc-12 cpp-12 libgcc-12-dev libcc1-0 libgomp1 binutils binutils-common libbinutils
    binutils-x86-64-linux-gnu libctf0 libctf-nobfd0 libgprofng0 libjansson4 libisl23 libmpc3
    libmpfr6 libgmp10 libzstd1 libc6-dev linux-libc-dev libcrypt-dev libpython3.11-dev libpython3.11
    libexpat1-dev zlib1g-dev libc-bin"""
"""A compiler for Triton's launchers, Python's headers, and `ldconfig`, which finds the driver."""


def newer(version: str, than: str | None) -> bool:
    words = ["dpkg", "--compare-versions", version, "gt", than or "0"]
    return subprocess.run(words, check=False).returncode == 0


def found(architecture: str, names: str) -> list[tuple[str, str]]:
    """(path below the mirror, SHA-256) of the newest version of each package in the lists."""
    wanted = names.split()
    packages: dict[str, tuple[str, str]] = {}
    newest: dict[str, str] = {}
    for place, suite in LISTS:
        url = f"{MIRROR}{place}/dists/{suite}/main/binary-{architecture}/Packages.xz"
        with urlopen(url) as answer:
            text = lzma.decompress(answer.read()).decode()
        for entry in text.split("\n\n"):
            fields = dict(
                re.findall(r"^(Package|Version|Filename|SHA256): (.*)$", entry, re.MULTILINE)
            )
            name = fields.get("Package", "")
            if name in wanted and newer(fields["Version"], newest.get(name)):
                newest[name] = fields["Version"]
                packages[name] = (f"{place}/{fields['Filename']}", fields["SHA256"])
    assert set(packages) == set(wanted), set(wanted) - set(packages)
    return sorted(packages.values())


if __name__ == "__main__":
    document = {
        "packages": {name: found(name, PACKAGES) for name in ("amd64", "arm64")},
        "cuda": {"amd64": found("amd64", CUDA)},
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n")
