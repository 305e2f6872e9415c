"""`headrace factory publish`, `bundle` and `load`: what goes from one store to another."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import NotFound
from ..factory.bundle import beside, panels, read_bundle, shipped, take_in, write_bundle
from ..factory.release import Rings
from ..factory.revoke import trusted
from ..factory.store import Descriptor, Store, store_folder
from .factory_parts import At, Trusted, existing

command = typer.Typer()


@command.command()
def publish(
    name: Annotated[str, typer.Argument(help="Ring, profile or image of the store.")],
    reference: Annotated[str, typer.Argument(help="host/repository:tag of a registry.")],
    store: At = None,
) -> None:
    """Bring a profile with its weights, or the image, to a registry; what is there is not sent."""
    # Local: other commands do without its packages.
    from ..factory.registry import Remote, tag_beside

    place, moved = existing(store), Moved()
    root = shipped(place, rings := Rings(place, trusted(None)), name)
    remote = Remote(reference)
    remote.push(place, root, moved)
    if (attested := beside(place, root)) is not None:
        remote.push(place, attested, moved, tag_beside(root))
    if (kept := panels(place, rings, name)) is not None:
        remote.push(place, kept, moved, tag_beside(root, "panels"))
    print(f"{reference} {root.digest}: {moved}")


@command.command()
def bundle(
    file: Annotated[Path, typer.Argument(help="The file to be written.")],
    names: Annotated[list[str], typer.Argument(help="Rings, profiles or images of the store.")],
    store: At = None,
) -> None:
    """Write profiles, weights and images into one file, for a place without a network."""
    place = existing(store)
    rings = Rings(place, trusted(None))
    things = {}
    for name in names:
        things[name] = root = shipped(place, rings, name)
        if (attested := beside(place, root)) is not None:
            things[f"{name}.att"] = attested
        if (kept := panels(place, rings, name)) is not None:
            things[f"{name}.panels"] = kept
    size = write_bundle(place, things, file)
    print(f"{file}: {size:,} bytes")


@command.command()
def load(
    source: Annotated[str, typer.Argument(help="A bundle, or host/repository:tag of a registry.")],
    with_panels: Annotated[
        bool, typer.Option("--panels", help="Of a registry, also its weights as kernels need them.")
    ] = False,
    store: At = None,
    key: Trusted = None,
) -> None:
    """Take what a bundle or a registry holds into the store, once its signature was checked."""
    place, moved = Store(store_folder(store)), Moved()
    if Path(source).is_file():
        things = read_bundle(place, Path(source))
    else:
        from ..factory.registry import Remote, tag_beside  # Local, as above.

        remote = Remote(source)
        things = {source.rpartition("/")[2]: (root := remote.pull(place, moved))}
        with suppress(NotFound):
            things["attestation"] = remote.pull(place, moved, tag_beside(root))
        if with_panels:
            things["panels"] = remote.pull(place, moved, tag_beside(root, "panels"))
    print(f"{', '.join(take_in(place, things, trusted(key)))}: taken in")


class Moved:
    """Counts what went over a network."""

    def __init__(self) -> None:
        self._count = self._bytes = self._there = 0

    def __call__(self, one: Descriptor, moved: bool) -> None:
        self._count, self._there = self._count + moved, self._there + (not moved)
        self._bytes += one.size if moved else 0

    def __str__(self) -> str:
        return f"{self._count} blobs, {self._bytes:,} bytes sent; {self._there} were there"
