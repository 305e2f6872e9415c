"""Environment variables, all of them: read here and nowhere else.

They exist for debugging and for paths that a container sets; every public choice is an option
(`base.config`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def cache_root() -> Path:
    """Return the folder of models and repacked weights, unless `--cache-dir` says otherwise."""
    explicit = os.environ.get("HEADRACE_CACHE")
    if explicit:
        return Path(explicit)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "headrace"


def offline() -> bool:
    """Return whether the network is forbidden for the whole process (also by the hub's own
    variable)."""
    return any(os.environ.get(name) == "1" for name in ("HEADRACE_OFFLINE", "HF_HUB_OFFLINE"))


def hub_token() -> str | None:
    return os.environ.get("HF_TOKEN")


def check_plans() -> bool:
    """Return whether every step plan is verified (always in tests)."""
    return os.environ.get("HEADRACE_CHECK") == "1"


def record_folder() -> Path | None:
    """Return the folder in which requests and answers are recorded, for `headrace replay`; None if
    they are not."""
    folder = os.environ.get("HEADRACE_RECORD")
    return Path(folder) if folder else None


def cluster_address() -> tuple[str, str] | None:
    """Return host and port of the Kubernetes API from a pod's variables; None elsewhere."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    return (host, port or "443") if host else None


def notify_socket() -> str:
    """Return the socket for notifications to systemd; empty without systemd."""
    return os.environ.get("NOTIFY_SOCKET", "")


def watchdog_seconds() -> float:
    """Return the seconds within which systemd expects a sign of life; 0: it expects none."""
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 1e6 if text.isdecimal() else 0.0


def debug() -> bool:
    """Return whether tracebacks are shown instead of one clear line."""
    return os.environ.get("HEADRACE_DEBUG") == "1"


def choose_sums(vectors: str) -> None:
    """Let Intel's MKL sum products in its strict order on AVX2 or AVX512, unless the user chose."""
    os.environ.setdefault("MKL_CBWR", f"{vectors},STRICT")


def with_temporary_folder(folder: Path) -> dict[str, str]:
    """Return the environment for a child process that keeps its temporary files in `folder`."""
    return {**os.environ, "TMPDIR": str(folder)}


def with_packages(path: Iterable[str]) -> dict[str, str]:
    """Return the environment for a child process that finds the same packages as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


_LAUNCHERS = ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


def launcher_variables() -> dict[str, str]:
    """Return the variables set by launchers of several processes: torchrun, Slurm and
    LeaderWorkerSet."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _LAUNCHERS or name.startswith(("MASTER_", "SLURM_", "LWS_"))
    }


def fuse_multiply_adds() -> None:
    """Keep Triton's default of fused multiply-adds, which release 3.10 changes: it decides bits."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def triton_interpreted() -> bool:
    """Return Triton's own switch: its kernels run in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_cache() -> Path:
    """Return the folder of Triton's cache, as Triton finds it."""
    if explicit := os.environ.get("TRITON_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def keep_triton_cache_in(folder: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def name_libcuda(folder: str) -> None:
    """Name the folder of the driver's library to Triton, which else asks ldconfig for it."""
    os.environ.setdefault("TRITON_LIBCUDA_PATH", folder)


def c_compiler() -> str | None:
    """Return the C compiler that Triton would call; None without one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
