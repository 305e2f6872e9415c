"""Count the files below src/headrace that a range of commits touched, by git.

Run: python tests/touched.py FIRST..LAST [-- PATH ...]; or `--grep WORD` for the commits whose
subject names something. Prints existing files changed, files added, and lines.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
OF = ("--format=",)


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def touched(commits: list[str]) -> tuple[dict[str, int], set[str]]:
    """Map each file that the commits changed to its added lines; and the files they created."""
    lines: dict[str, int] = defaultdict(int)
    created = set()
    for commit in commits:
        for row in git("show", "--numstat", "--no-renames", *OF, commit, "--", "src/headrace"):
            added, _, name = row.split("\t")
            lines[name] += int(added) if added.isdigit() else 0
        named = "show", "--diff-filter=A", "--name-only", *OF, commit, "--", "src/headrace"
        created.update(git(*named))
    return dict(lines), created


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("range", nargs="?", default="HEAD", help="FIRST..LAST, as git log takes it")
    parser.add_argument("--grep", help="only commits whose message matches")
    parser.add_argument("--names", action="store_true", help="print each file")
    arguments = parser.parse_args()
    chosen = ["--grep", arguments.grep, "--regexp-ignore-case"] if arguments.grep else []
    commits = git("rev-list", "--no-merges", *chosen, arguments.range)
    lines, created = touched(commits)
    changed = sorted(set(lines) - created)
    print(f"{len(commits)} commits: {len(changed)} existing files changed, {len(created)} added,")
    print(f"{sum(lines.values())} lines added")
    if arguments.names:
        for name in [*changed, *sorted(created)]:
            print(f"{'new' if name in created else 'changed':8} {lines.get(name, 0):6} {name}")


if __name__ == "__main__":
    main()
