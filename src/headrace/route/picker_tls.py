"""TLS of the picker's port; certificates are reloaded when their files change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("headrace.route")


class Certificates:
    """Files of a server's certificate, which gRPC asks for before each handshake."""

    def __init__(self, grpc: Any, folder: Path, clients: Path | None) -> None:
        """Read the files.

        `folder` has `tls.crt` and `tls.key`, as Kubernetes mounts them. `clients`: the CA that must
        have signed the clients' certificates. Raises `OSError`.
        """
        self._grpc = grpc
        self._files = [folder / "tls.key", folder / "tls.crt", *([clients] if clients else [])]
        self._mutual = clients is not None
        self._seen = self._read()

    def credentials(self) -> Any:
        """Make the credentials of a port."""
        first = self._configuration()
        return self._grpc.dynamic_ssl_server_credentials(
            first, self._newer, require_client_authentication=self._mutual
        )

    def _read(self) -> list[bytes]:
        return [file.read_bytes() for file in self._files]

    def _configuration(self) -> Any:
        key, chain, *clients = self._seen
        return self._grpc.ssl_server_certificate_configuration(
            [(key, chain)], root_certificates=clients[0] if clients else None
        )

    def _newer(self) -> Any:
        """Return the changed certificates, or None if they are unchanged. gRPC calls it in its own
        thread."""
        try:
            found = self._read()
        except OSError as fault:
            log.error("the picker's certificate stays", extra={"reason": str(fault)})
            return None
        if found == self._seen:
            return None
        self._seen = found
        return self._configuration()
