"""TLS of a gRPC port; certificates are reloaded when their files change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tls import CRL, log


class Certificates:
    """Files of a server's certificate, which gRPC asks for before each handshake."""

    def __init__(self, grpc: Any, key: Path, chain: Path, clients: Path | None) -> None:
        """Read the files. `clients`: the CA that must have signed the clients' certificates. Raises
        `OSError`, also for a revocation list, which gRPC would ignore."""
        self._grpc = grpc
        self._files = [key, chain, *([clients] if clients else [])]
        self._mutual = clients is not None
        self._seen = self._read()

    def credentials(self) -> Any:
        """Make the credentials of a port."""
        first = self._configuration()
        return self._grpc.dynamic_ssl_server_credentials(
            first, self._newer, require_client_authentication=self._mutual
        )

    def _read(self) -> list[bytes]:
        found = [file.read_bytes() for file in self._files]
        if self._mutual and CRL in found[2]:
            raise OSError(None, "gRPC heeds no list of revoked certificates", self._files[2])
        return found

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
            log.error("the certificate of the gRPC port stays", extra={"reason": str(fault)})
            return None
        if found == self._seen:
            return None
        self._seen = found
        return self._configuration()
