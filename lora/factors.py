"""From an adapter's tensors to checked factors of each module.

Owns peft's tensor names, every check made before an adapter is registered, and the digest. Ignores
files and where factors are kept.

Shapes: R rank, K inputs, N outputs of a module, unsharded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lora.errors import InvalidAdapter, UnsupportedAdapter
from lora.geometry import Geometry, Kind
from lora.peft_config import PeftConfig

SameBase = Callable[[str, torch.Tensor], bool]
"""Whether the model's weight of a module equals a tensor."""

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}
_FACTOR = re.compile(r"^(?P<module>.+)\.(?P<factor>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?P<rest>\..+)?$")
_REFUSED = {
    "lora_magnitude_vector": "use_dora",
    "modules_to_save": "modules_to_save",
    "trainable_tokens": "trainable_token_indices",
    "token_adapter": "trainable_token_indices",
}
_LISTED = 6


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to a module: scale * ((x @ a.T) @ b.T + bias). For an embedding x is one-hot."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor
    scale: float
    bias_N: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a_RK.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter, checked against a geometry; `digest` is SHA-256 over all it computes with."""

    modules: dict[str, Factors]
    digest: str


def check_weights(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    geometry: Geometry,
    max_rank: int,
    same_base: SameBase,
) -> AdapterWeights:
    """The factors of every adapted module, owned by nobody else. Raises `AdapterError` naming what is
    wrong: a field, a tensor, a module that the model does not have or that lacks its tensors."""
    peft = PeftConfig(config)
    found = _collect(tensors, geometry, same_base)
    if not found:
        raise InvalidAdapter(
            "tensors", f"factors of the model's modules, like {_names(geometry.places)}", list(tensors)[:3]
        )
    wanted = peft.targets(geometry)
    if wanted is not None and wanted != set(found):
        missing, extra = wanted - set(found), set(found) - wanted
        raise InvalidAdapter(
            "target_modules", f"tensors for {_names(missing)} too" if missing else f"no tensors for {_names(extra)}",
            f"{len(found)} modules with tensors, {len(wanted)} selected",
        )  # fmt: skip
    modules = {}
    for module in sorted(found):
        modules[module] = _factors(module, found[module], peft, geometry, max_rank)
    return AdapterWeights(modules, _digest(modules))


def _collect(
    tensors: Mapping[str, torch.Tensor], geometry: Geometry, same_base: SameBase
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by module and role. A copy of an unchanged base weight is dropped."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        for mark, field in _REFUSED.items():
            if mark in name.split("."):
                raise UnsupportedAdapter(field, "not used", name)
        plain = _plain(name)
        match = _FACTOR.match(plain)
        if match is None:
            _check_base_copy(name, plain, tensor, geometry, same_base)
            continue
        module = match["module"]
        if module not in geometry.places:
            unknown.append(name)
            continue
        role = match["factor"] + (".bias" if (match["rest"] or "").endswith(".bias") else "")
        if role in found.setdefault(module, {}):
            raise InvalidAdapter(name, "one adapter's tensors", f"a second {role} of {module}")
        found[module][role] = tensor
    if unknown:
        raise InvalidAdapter(
            "tensors", f"modules of the model, like {_names(geometry.places)}", f"unknown {_names(unknown)}"
        )
    return found


def _check_base_copy(name: str, plain: str, tensor: torch.Tensor, geometry: Geometry, same_base: SameBase) -> None:
    """peft saves embeddings beside their factors; only the model's own will do."""
    module = plain.removesuffix(".weight").removesuffix(".base_layer")
    if not plain.endswith(".weight") or module not in geometry.places:
        raise UnsupportedAdapter("modules_to_save", "nothing beside the factors", name)
    if not same_base(module, tensor):
        raise UnsupportedAdapter("modules_to_save", f"{name} equal to the base model's own", "another weight")


def _plain(name: str) -> str:
    """The model's own name: without what wrappers put around it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(parts)


def _factors(
    module: str, roles: dict[str, torch.Tensor], peft: PeftConfig, geometry: Geometry, max_rank: int
) -> Factors:
    embedding = geometry.kind(module) is Kind.EMBEDDING
    first, second = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    allowed = {first, second} | ({f"{second}.bias"} if peft.bias and not embedding else set())
    if set(roles) - allowed:
        raise InvalidAdapter(module, f"{sorted(allowed)}", sorted(roles))
    if set(roles) != allowed:
        raise InvalidAdapter(module, f"all of {sorted(allowed)}", sorted(roles))
    inputs, outputs = geometry.module_shape(module)
    rank = peft.rank_of(module)
    if rank > max_rank:
        raise InvalidAdapter(f"{module} rank", f"at most {max_rank}", rank)
    shapes = {first: (rank, inputs), second: (outputs, rank), f"{second}.bias": (outputs,)}
    for role, tensor in roles.items():
        where = f"{module}.{role}"
        if tuple(tensor.shape) != shapes[role]:
            raise InvalidAdapter(f"{where} shape", list(shapes[role]), list(tensor.shape))
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InvalidAdapter(f"{where} dtype", "float32, bfloat16 or float16", tensor.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidAdapter(where, "finite values", "NaN or infinity")
    own = {role: tensor.detach().cpu().contiguous().clone() for role, tensor in roles.items()}
    return Factors(own[first], own[second], peft.scale_of(module), own.get(f"{second}.bias"))


def _digest(modules: Mapping[str, Factors]) -> str:
    total = hashlib.sha256()
    for module, factors in modules.items():
        total.update(f"{module}\0{factors.scale!r}\0".encode())
        for tensor in (factors.a_RK, factors.b_NR, factors.bias_N):
            if tensor is not None:
                total.update(f"{tensor.dtype}\0{list(tensor.shape)}\0".encode())
                total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
