"""TLS and mutual TLS, with certificates that are reloaded when their files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base.config import ServerOptions
from ..base.errors import OptionError

log = logging.getLogger("headrace.server.tls")

LOOK_SECONDS = 10.0
LOGGED_SECONDS = 60.0
"""Minimum seconds between two log lines about handshakes that fail for one reason."""
PLAIN = "HTTP_REQUEST"
"""OpenSSL's reason if a client does not speak TLS at all, but HTTP."""
CRL = b"-----BEGIN X509 CRL-----"


class _Newest(ssl.SSLContext):
    """Context that a listener holds for life; `current` makes each connection.

    A context in use cannot be changed safely. Loading a certificate drops the old key before the
    new one is known to be good, and a loaded CA stays trusted for ever (ADR 0053).
    """

    current: ssl.SSLContext

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*arguments, **named)


class _Handshakes:
    """Log of failed handshakes: asyncio closes those connections without a word."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}
        """Reason (OpenSSL has some hundred) → time of its last line, failures since."""

    def note(self, error: ssl.SSLError) -> None:
        """Log a failure, at most one line a minute for each reason."""
        reason, now = error.reason or type(error).__name__, self._clock()
        last, since = self._logged.get(reason, (-LOGGED_SECONDS, 0))
        if now - last < LOGGED_SECONDS:
            self._logged[reason] = last, since + 1
            return
        self._logged[reason] = now, 0
        text = "a client spoke plain HTTP to the TLS port: its address must begin with https"
        log.warning(
            text if reason == PLAIN else "a TLS handshake failed",
            extra={"reason": reason, "times": since + 1},
        )

    def watched(self) -> type[ssl.SSLObject]:
        """Return a class of connections whose failed handshakes are noted."""
        note = self.note

        class Watched(ssl.SSLObject):
            def do_handshake(self) -> None:
                try:
                    super().do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except ssl.SSLError as error:
                    note(error)
                    raise

        return Watched


class Tls:
    """TLS context of one server; `watch` keeps its certificate fresh."""

    def __init__(self, cert: Path, key: Path, clients: Path | None) -> None:
        """Load the files. Raises `OptionError` naming the file that cannot be used."""
        self.failed: Callable[[str], None] = lambda kind: None
        """Callback for each failure to read the files again."""
        self._files = [cert, key] + ([clients] if clients else [])
        self._cert, self._key, self._clients = cert, key, clients
        self._seen = self._state()
        self._connections = _Handshakes().watched()
        self.context = _Newest(ssl.PROTOCOL_TLS_SERVER)
        self.context.current = self._fresh()

    @classmethod
    def of(cls, options: ServerOptions) -> Tls | None:
        cert, key, clients = options.tls_cert, options.tls_key, options.tls_clients
        if cert is None and key is None and clients is None:
            return None
        if cert is None or key is None:
            raise OptionError("TLS needs both tls_cert and tls_key", param="tls_cert")
        return cls(Path(cert), Path(key), Path(clients) if clients else None)

    def _fresh(self) -> ssl.SSLContext:
        """Return a context made only of the current files. Raises `OptionError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = self._connections
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            raise OptionError(
                f"cannot use {self._cert} with {self._key}: {error}", param="tls_cert"
            ) from None
        if self._clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._clients)
                if CRL in self._clients.read_bytes():
                    context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
            except (OSError, ssl.SSLError) as error:
                raise OptionError(
                    f"cannot use {self._clients}: {error}", param="tls_clients"
                ) from None
        return context

    def _state(self) -> list[tuple[int, int, int]]:
        found = []
        for path in self._files:
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                found.append((0, 0, 0))
        return found

    def refresh(self) -> bool:
        """Reload changed files; if they do not fit together, keep the old ones."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            self.context.current = self._fresh()
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
