"""This process's rank and the number of ranks, from a launcher's environment variables."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...base.config import EngineOptions
from ...base.environment import launcher_variables
from ...base.errors import OptionError
from ...base.layout import Layout
from ...dist.hosts import HostPort

PORT = 29500
"""Port where rank 0 awaits the others, if the launcher names none."""
MOST_RANKS = 64
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    ranks: int
    leader: HostPort
    """Address where rank 0 awaits the others."""
    key: bytes
    """Secret shared by all ranks; empty if no other process can connect."""
    stages: int = 1


def place_of(options: EngineOptions, said: Mapping[str, str] | None = None) -> RankPlace:
    """Return this process's place in a layout. Raises `OptionError`."""
    if options.launcher == "ray":
        return _placing(options)
    said = launcher_variables() if said is None else said
    rank, ranks, leader = _torchrun(said) or _worker_set(said) or _slurm(said) or _nobody()
    if ranks > MOST_RANKS or not 0 <= rank < ranks:
        raise OptionError(f"the launcher says rank {rank} of {ranks}", param="launcher")
    layout = Layout.parse(options.layout)
    if layout.devices != ranks:
        raise OptionError(
            f"layout {layout} is of {layout.devices} processes, and the launcher started {ranks}",
            param="layout",
        )
    return RankPlace(rank, ranks, leader, _key(options, leader), layout.pp)


def _placing(options: EngineOptions) -> RankPlace:
    """Return the place of rank 0; the ranks that it places get its address and a fresh key."""
    if options.rank_key is not None:
        raise OptionError("launcher ray makes a key for each start", param="rank_key")
    layout = Layout.parse(options.layout)
    if layout.devices > MOST_RANKS:
        raise OptionError(f"launcher ray places at most {MOST_RANKS} ranks", param="layout")
    here, key = HostPort(socket.gethostname(), 0), secrets.token_bytes(_KEY_BYTES)
    return RankPlace(0, layout.devices, here, key, layout.pp)


def _torchrun(said: Mapping[str, str]) -> tuple[int, int, HostPort] | None:
    if not said.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"}:
        return None
    port = _number(said, "MASTER_PORT", PORT)
    # The agent itself listens there, for PyTorch's stores.
    port += said.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leader = HostPort(said["MASTER_ADDR"], port)
    return _number(said, "RANK"), _number(said, "WORLD_SIZE"), leader


def _worker_set(said: Mapping[str, str]) -> tuple[int, int, HostPort] | None:
    if not said.keys() >= {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}:
        return None
    leader = HostPort(said["LWS_LEADER_ADDRESS"], _number(said, "MASTER_PORT", PORT))
    return _number(said, "LWS_WORKER_INDEX"), _number(said, "LWS_GROUP_SIZE"), leader


def _slurm(said: Mapping[str, str]) -> tuple[int, int, HostPort] | None:
    if not said.keys() >= {"SLURM_PROCID", "SLURM_NTASKS"}:
        return None
    nodes = said.get("SLURM_STEP_NODELIST") or said.get("SLURM_JOB_NODELIST", "")
    host = said.get("MASTER_ADDR") or first_node(nodes)
    # Jobs that share a node have different ports.
    port = _number(said, "MASTER_PORT", PORT + _number(said, "SLURM_JOB_ID", 0) % 10_000)
    return _number(said, "SLURM_PROCID"), _number(said, "SLURM_NTASKS"), HostPort(host, port)


def _nobody() -> tuple[int, int, HostPort]:
    raise OptionError(
        "launcher env: no launcher says which rank this is; torchrun sets RANK, WORLD_SIZE and "
        "MASTER_ADDR, Slurm SLURM_PROCID and SLURM_NTASKS, a LeaderWorkerSet LWS_WORKER_INDEX, "
        "LWS_GROUP_SIZE and LWS_LEADER_ADDRESS",
        param="launcher",
    )


def first_node(nodes: str) -> str:
    """Return the first host of a list in Slurm's form: `gpu[07-09,12],login` begins with `gpu07`.
    Raises `OptionError`."""
    found = re.match(r"([^\[,\s]+)(?:\[(\w+)[^\]]*\]([^,\s]*))?", nodes)
    if found is None:
        raise OptionError(
            "launcher env: Slurm names no nodes (SLURM_STEP_NODELIST), and MASTER_ADDR is not set",
            param="launcher",
        )
    return "".join(filter(None, found.groups()))


def _number(said: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = said.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,9}", text):
        raise OptionError(f"launcher env: {name} is no number: {text!r:.40}", param="launcher")
    return int(text)


def _key(options: EngineOptions, leader: HostPort) -> bytes:
    if options.rank_key is None:
        if _loopback(leader.host):
            return b""
        raise OptionError(
            f"ranks on several hosts want a key that only they know: rank_key, a file of at least "
            f"{_KEY_BYTES} bytes (rank 0 is at {leader})",
            param="rank_key",
        )
    path = Path(options.rank_key)
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}", param="rank_key") from None
    if len(key) < _KEY_BYTES:
        raise OptionError(
            f"{path} holds {len(key)} bytes, and a key has at least {_KEY_BYTES}", param="rank_key"
        )
    return key


def _loopback(host: str) -> bool:
    try:
        found = {one[4][0] for one in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(one).is_loopback for one in found)
