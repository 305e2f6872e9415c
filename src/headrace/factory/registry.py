"""One repository of a registry: pushing to it and pulling from it.

oras handles sessions, tokens and chunked uploads. Manifests are sent byte for byte, since their
digest is their name. Nothing received is trusted before its digest was computed.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..base.errors import DownloadError, NotFound, OptionError, Untrusted
from ..base.extras import needing
from .key import digest_of, is_digest
from .store import CHUNK, INDEX_TYPE, MANIFEST_TYPE, SMALL, Descriptor, Store

with needing("the factory needs", "factory"):
    from oras.container import Container
    from oras.provider import Registry
    from requests import RequestException, Response

TIMEOUT = 60.0
"""Seconds in which a registry must respond."""
LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
"""Registries that are used without TLS; no other is."""
LARGEST = 10_000_000_000
"""Most bytes of a layer: many registries, and the clouds in front of them, accept no more."""
MANIFESTS = (INDEX_TYPE, MANIFEST_TYPE)
Watch = Callable[[Descriptor, bool], None]
"""Callback for each blob, with whether it had to be transferred."""


class _Once(Registry):  # type: ignore[misc]
    """A registry without retries: oras would repeat a failing call for two minutes."""

    do_request = Registry.do_request.__wrapped__


class Remote:
    """One repository of a registry. Every method raises `DownloadError`, `Untrusted`."""

    def __init__(self, reference: str) -> None:
        """Connect to a repository. Raises `OptionError`. `reference`: host[:port]/repository:tag or
        @digest.

        Credentials are those of the container tools' configuration.
        """
        host, slash, rest = reference.partition("/")
        tagged = rest.rpartition("/")[2].partition(":")[2] or rest.partition("@")[2]
        if not slash or not tagged or not re.search("[.:]|^localhost$", host):
            raise OptionError(f"{reference!r:.100} is no host/repository:tag", param="reference")
        with _asked(host):
            self._at = Container(reference)
            self._registry = _Once(host, insecure=bool(LOOPBACK.fullmatch(host)))
            session = self._registry.session
            session.request = functools.partial(session.request, timeout=TIMEOUT)
            self._registry.auth.load_configs(self._at)
        self._host, self._tag = host, self._at.digest or self._at.tag

    def push(self, store: Store, root: Descriptor, watch: Watch, tag: str | None = None) -> None:
        """Push everything that `root` needs, dependencies first, and its tag last.

        `tag`: instead of the reference's. Raises `OptionError` before anything is sent if a blob is
        too large.
        """
        parts = store.closure(root)
        if large := [one for one in parts if one.size > LARGEST]:
            raise OptionError(
                f"{large[0].digest} has {large[0].size:,} bytes, registries take {LARGEST:,} at "
                "most: publish safetensors in shards, or bring a bundle",
                param="name",
            )
        for one in parts:
            if one.media_type in MANIFESTS:
                continue
            with _asked(self._host):
                there = self._registry.blob_exists({"digest": one.digest}, self._at)
                if not there:
                    self._upload(store.blob(one.digest), one)
            watch(one, not there)
        for one in parts:
            if one.media_type in MANIFESTS:
                self._put_manifest(store.read(one.digest), one, one.digest)
                watch(one, True)
        self._put_manifest(store.read(root.digest), root, tag or self._tag)

    def pull(self, store: Store, watch: Watch, tag: str | None = None) -> Descriptor:
        """Pull the tagged artefact and its dependencies into the store; return its descriptor."""
        data, kind = self._get_manifest(tag := tag or self._tag)
        root = Descriptor(digest=digest_of(data), size=len(data), media_type=kind)
        if is_digest(tag) and tag != root.digest:
            raise Untrusted(f"{self._host} gives other bytes for {tag}")

        def bring(one: Descriptor) -> None:
            if fresh := not store.has(one):
                if one.media_type in MANIFESTS:
                    data, _ = self._get_manifest(one.digest)
                    store.put_stream(io.BytesIO(data), one.media_type, one)
                else:
                    with _asked(self._host), self._get(one.digest) as answer:
                        store.put_stream(answer.raw, one.media_type, one)
            watch(one, fresh)

        store.closure(root, bring=bring)
        return root

    def _upload(self, path: Path, one: Descriptor) -> None:
        send = self._registry.put_upload if one.size <= CHUNK else self._registry.chunked_upload
        answer = send(str(path), self._at, one.document())
        if answer.status_code != 201:
            raise DownloadError(f"{self._host} refused {one.digest}: {answer.text:.200}")

    def _put_manifest(self, data: bytes, one: Descriptor, tag: str) -> None:
        with _asked(self._host):
            url = f"{self._registry.prefix}://{self._at.manifest_url(tag)}"
            answer = self._registry.do_request(
                url, "PUT", data=data, headers={"Content-Type": one.media_type}
            )
        if answer.status_code != 201:
            raise DownloadError(f"{self._host} refused the manifest {tag}: {answer.text:.200}")

    def _get_manifest(self, tag: str) -> tuple[bytes, str]:
        with _asked(self._host):
            url = f"{self._registry.prefix}://{self._at.manifest_url(tag)}"
            headers = {"Accept": ", ".join(MANIFESTS)}
            with self._registry.do_request(url, headers=headers, stream=True) as answer:
                data = answer.raw.read(SMALL + 1) if answer.status_code == 200 else b""
        kind = answer.headers.get("Content-Type", "")
        if answer.status_code == 404:
            raise NotFound(f"{self._host} has no {tag}", param="reference")
        if answer.status_code != 200 or len(data) > SMALL or kind not in MANIFESTS:
            raise DownloadError(
                f"{self._host} gives no manifest {tag}: {answer.status_code} {kind:.80}"
            )
        return data, kind

    def _get(self, digest: str) -> Response:
        answer: Response = self._registry.get_blob(self._at, digest, stream=True)
        if answer.status_code != 200:
            raise DownloadError(f"{self._host} gives no {digest}: status {answer.status_code}")
        return answer


@contextmanager
def _asked(host: str) -> Iterator[None]:
    """Raise `DownloadError` for any error of a registry or the network."""
    try:
        yield
    except (RequestException, ValueError, KeyError) as error:
        raise DownloadError(f"{host} cannot be asked: {error!s:.300}") from None
