"""The role of an engine in a prefill/decode split, decided at the start."""

from __future__ import annotations

from ...base.config import Decision, EngineOptions
from ...base.errors import OptionError
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...base.split import Role


def split_role(options: EngineOptions, files: ModelFiles, device: str) -> Decision | None:
    """Decide the role that was asked for; None for "both". Raises `OptionError` if it is
    impossible."""
    role = Role.parse(options.role)
    if role.kind == "both":
        return None
    role.secret()
    obstacle = ""
    if files.arch.task != "tokens":
        obstacle = "an encoder keeps no blocks that another server could go on from"
    elif device != "cpu":
        obstacle = f"blocks of a pool on {device} are not lent yet"
    elif not options.prefix_cache:
        obstacle = "blocks are lent by their names in the prefix cache, which is off"
    elif Layout.parse(options.layout) != ONE:
        obstacle = "a block of ranks that share a model lies in pieces"
    elif options.executor != "inline":
        obstacle = "the worker has to be in the engine's process (executor inline)"
    if obstacle:
        raise OptionError(f"role {role.kind}: {obstacle}", param="role")
    sealed = "sealed with a key" if role.key is not None else "this machine only"
    where = "computes prompts for others at" if role.kind == "prefill" else "may have them from"
    return Decision("role", role.kind, f"{where} {', '.join(role.addresses)}; {sealed}")
