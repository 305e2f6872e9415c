"""The weights of a folder of safetensors, read when they are taken, dense or quantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..base.arch import ModelArch
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..models.registry import FAMILIES, describe
from ..quant.ggml_types import DENSE
from ..quant.schemes import scheme_of
from . import latent_heads, row_parts
from .interleaved_experts import STACKS, ExpertPart, expert_parts
from .jsonfile import read_json
from .names import Shapes, check, each_expert, from_hf_name, kv_scales
from .quantised_safetensors import QuantisedMatrices
from .safetensors_file import StoredTensor
from .shards import read_headers
from .weight_source import Stored


def from_safetensors(files: ModelFiles) -> Iterator[tuple[str, Stored]]:
    """Yield the weights; see `weights.load_weights`."""
    stored = read_headers(files.weights)
    for name in kv_scales(stored):
        del stored[name]
    scheme = scheme_of(read_json(files.path / "config.json"))
    quantised = None if scheme is None else QuantisedMatrices(scheme, stored)
    names: dict[str, str] = {}
    """Name in the file → canonical name, with `*` for all experts at once."""
    found: Shapes = {}

    def claim(name: str, source: str, shape: tuple[int, ...]) -> None:
        canonical = from_hf_name(name, files.arch)
        if canonical is None:
            return
        names[source] = canonical
        parts = latent_heads.shapes(canonical, shape, files.arch)
        for each, order in row_parts.parts(canonical, shape, files.arch).items():
            parts[each] = len(order), shape[1]
        for each, part in parts.items() or (named[:2] for named in each_expert(canonical, shape)):
            if each in found:
                raise ModelFileError(f"{files.path.name}: {each} appears twice")
            found[each] = part

    if quantised is not None:
        for module, main, shape in quantised.shapes():
            claim(f"{module}.weight", main, shape)
    wanted = describe(files.arch).tensors()
    experts: dict[str, ExpertPart] = {}
    order = FAMILIES[files.arch.family].names.transposed
    if order and not (order == "perhaps" and _upright(stored, files.arch)):
        experts = expert_parts(stored, turns=order == "interleaved")
        found |= {name: part.shape for name, part in experts.items()}
        stored = {
            name: tensor for name, tensor in stored.items() if not any(at in name for at in STACKS)
        }
    for name, tensor in stored.items():
        bias_of = name.removesuffix(".bias")
        if quantised is not None and name in quantised.members:
            continue
        if (
            quantised is not None
            and bias_of in quantised
            and from_hf_name(name, files.arch) not in wanted
        ):
            # GPTQ writers add zero biases to models without them: only zeros may be left out.
            if tensor.read().any():
                raise ModelFileError(
                    f"{tensor.shard.name}: {name:.100} is a bias that the model has not"
                )
            continue
        claim(name, name, tensor.shape)
        if name in names and tensor.dtype not in DENSE:
            raise UnsupportedModel(
                f"{tensor.shard.name}: {name:.100} is {tensor.dtype}; supported: {', '.join(DENSE)}"
            )
    check(found, files.arch, files.path.name)

    yield from experts.items()
    for name, tensor in stored.items():
        if name in names:
            matrix = None if quantised is None else quantised.find(name)
            one = matrix or tensor
            if latent_heads.shapes(names[name], one.shape, files.arch):
                yield from latent_heads.stored(names[name], one, files.arch)
                continue
            if row_parts.parts(names[name], one.shape, files.arch):
                yield from row_parts.stored(names[name], one, files.arch)
                continue
            if matrix is not None:
                yield names[name], matrix
                continue
            for each, part, (expert, row) in each_expert(names[name], tensor.shape):
                yield each, tensor.rows(expert, row, part)


def _upright(stored: Mapping[str, StoredTensor], arch: ModelArch) -> bool:
    """Return whether stacks of experts are [experts, out, in], as transformers writes them."""
    wanted = None if arch.moe is None else (2 * arch.moe.intermediate, arch.hidden)
    stacks = (one for name, one in stored.items() if name.endswith(".experts.gate_up_proj"))
    return all(stack.shape[1:] == wanted for stack in stacks)
