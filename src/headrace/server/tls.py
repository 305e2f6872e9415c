"""TLS, and mutual TLS, with certificates that are read again when their files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from ..base.config import ServerOptions
from ..base.errors import OptionError

log = logging.getLogger("headrace.server.tls")

LOOK_SECONDS = 10.0


class Tls:
    """The context of one server; `watch` keeps its certificate fresh."""

    def __init__(self, cert: Path, key: Path, clients: Path | None) -> None:
        """Raises `OptionError` naming the file that cannot be used."""
        self.failed: Callable[[str], None] = lambda kind: None
        """Told of each failure to read the files again."""
        self._files = [cert, key] + ([clients] if clients else [])
        self._cert, self._key, self._clients = cert, key, clients
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()
        if clients is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._seen = self._state()

    @classmethod
    def of(cls, options: ServerOptions) -> Tls | None:
        cert, key, clients = options.tls_cert, options.tls_key, options.tls_clients
        if cert is None and key is None and clients is None:
            return None
        if cert is None or key is None:
            raise OptionError("TLS needs both tls_cert and tls_key", param="tls_cert")
        return cls(Path(cert), Path(key), Path(clients) if clients else None)

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            raise OptionError(
                f"cannot use {self._cert} with {self._key}: {error}", param="tls_cert"
            ) from None
        if self._clients is not None:
            try:
                self.context.load_verify_locations(self._clients)
            except (OSError, ssl.SSLError) as error:
                raise OptionError(
                    f"cannot use {self._clients}: {error}", param="tls_clients"
                ) from None

    def _state(self) -> list[int]:
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in self._files]

    def refresh(self) -> bool:
        """Read changed files again; what is no certificate is logged and the old one stays."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            self._load()
        except OptionError as error:
            log.error("the certificate stays", extra={"reason": error.message})
            self.failed("certificate_read")
            return False
        log.info("the certificate was read again")
        return True

    async def watch(self, seconds: float = LOOK_SECONDS) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.refresh()
