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


def newer(version: str, than: str | None) -> bool:
    words = ["dpkg", "--compare-versions", version, "gt", than or "0"]
    return subprocess.run(words, check=False).returncode == 0


def found(architecture: str) -> dict[str, tuple[str, str]]:
    """Name → (path below the mirror, SHA-256) of the newest version in the lists."""
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
            if name in PACKAGES.split() and newer(fields["Version"], newest.get(name)):
                newest[name] = fields["Version"]
                packages[name] = (f"{place}/{fields['Filename']}", fields["SHA256"])
    assert set(packages) == set(PACKAGES.split()), set(PACKAGES.split()) - set(packages)
    return packages


if __name__ == "__main__":
    both = {name: sorted(found(name).values()) for name in ("amd64", "arm64")}
    OUT.write_text(json.dumps({"packages": both}, indent=1) + "\n")
