"""Which of several backends prefills fastest, measured on the model's own shapes.

Owns the decision and its copy on disk. Ignores what is timed (`engine.attention.prefill_scenes`),
how backends compute and which are candidates (`engine.attention.registry`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from engine.attention.base import AttentionBackend
from engine.attention.prefill_scenes import Clock, Scene, prefill_workloads, wall_seconds
from engine.errors import SparkrollError
from engine.models.spec import ModelSpec

Make = Callable[[ModelSpec], AttentionBackend]

WORTHWHILE = 0.97
"""Share of the default's time that another backend must stay under: less is noise."""
TOLERANCE = 2e-2
"""Relative error against the default's results, well above rounding of 16-bit floats."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a choice is made for. `prefill_tokens` is the size of a prefill step."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    page_size: int
    prefill_tokens: int
    deterministic: bool = False


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`seconds` of attention in one step, by backend and workload. `left_out` says why a candidate
    was no choice. `key` is all that the decision depends on."""

    key: dict[str, str]
    name: str
    seconds: dict[str, dict[str, float]]
    left_out: dict[str, str]

    def describe(self) -> str:
        workloads = next(iter(self.seconds.values()), {})
        figures = [
            f"{workload}: "
            + ", ".join(f"{name} {times[workload] * 1e3:.3g} ms" for name, times in self.seconds.items())
            for workload in workloads
        ]
        reasons = [f"not {name}: {reason}" for name, reason in self.left_out.items()]
        return f"attention: prefill by {self.name} ({'; '.join(figures + reasons)})"


def choose(setting: Setting, make: Mapping[str, Make], folder: Path, clock: Clock = wall_seconds) -> Choice:
    """What `folder` remembers for the setting, or else a measurement, remembered there.

    The first of `make` is the default: another is chosen if it agrees with the default's results
    and is faster over all workloads together. A measurement that left a candidate out is not
    remembered: the next start may do better.
    """
    key = key_of(setting, list(make))
    known = recall(key, folder)
    if known is not None:
        return known
    choice = measure(setting, make, clock)
    if not choice.left_out:
        remember(choice, folder)
    return choice


def measure(setting: Setting, make: Mapping[str, Make], clock: Clock = wall_seconds) -> Choice:
    spec, device = setting.spec, setting.device
    default = next(iter(make))
    kinds = list(dict.fromkeys(spec.layers))
    # One layer of each kind is stored, and runs as often as there are layers like it.
    small = replace(spec, num_layers=len(kinds), layers=tuple(kinds))
    times = [spec.layers.count(kind) for kind in kinds]
    workloads = prefill_workloads(setting.prefill_tokens, spec.context_len)
    scenes = [Scene(workload, small, setting.page_size, setting.dtype, device) for workload in workloads]
    seconds: dict[str, dict[str, float]] = {}
    left_out: dict[str, str] = {}
    expected: list[list[torch.Tensor]] = []
    for name, build in make.items():
        try:
            backend = build(small)
            outputs = [scene.run(backend, [1] * len(kinds)) for scene in scenes]
            expected = expected or outputs
            if name != default and not _agree(outputs, expected):
                left_out[name] = f"its results differ from those of {default}"
                continue
            seconds[name] = {
                scene.name: clock(lambda run=scene.run, used=backend: run(used, times), device) for scene in scenes
            }
        # An optional library fails in its own ways: a compiler missing, an old driver. The engine
        # starts without it and says so.
        except Exception as error:
            if name == default:
                raise
            reason = error.message if isinstance(error, SparkrollError) else f"{type(error).__name__}: {error}"
            left_out[name] = reason[:200]
    best = min(seconds, key=lambda name: sum(seconds[name].values()))
    if sum(seconds[best].values()) > WORTHWHILE * sum(seconds[default].values()):
        best = default
    return Choice(key_of(setting, list(make)), best, seconds, left_out)


def _agree(outputs: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    pairs = [pair for left, right in zip(outputs, expected, strict=True) for pair in zip(left, right, strict=True)]
    # Written so that a NaN disagrees.
    return all(bool((out - right).float().norm() <= TOLERANCE * right.float().norm()) for out, right in pairs)


# The copy on disk: a file a key, so that processes never wait for each other.


def _file(key: Mapping[str, str], folder: Path) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(dict(key), order="sorted")).hexdigest()[:24]
    return folder / f"{digest}.json"


def key_of(setting: Setting, names: list[str]) -> dict[str, str]:
    """Everything that a measurement depends on: shapes, device, libraries and our own kernels."""
    spec, device = setting.spec, setting.device
    layers = {str(layer): spec.layers.count(layer) for layer in spec.layers}
    return {
        "backends": " ".join(names),
        "heads": f"{spec.num_heads} {spec.num_kv_heads} {spec.head_dim}",
        "layers": str(layers),
        "context": str(spec.context_len),
        "dtype": str(setting.dtype),
        "page_size": str(setting.page_size),
        "prefill_tokens": str(setting.prefill_tokens),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "libraries": " ".join(_installed(name) for name in ("torch", "triton", "flashinfer-python")),
        "kernels": _kernel_digest(),
    }


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _kernel_digest() -> str:
    """Of the sources that decide how fast the portable kernels are."""
    package = Path(__file__).parent
    sources = sorted([*package.glob("*.py"), *(package.parent / "kernels").glob("*attention*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def recall(key: Mapping[str, str], folder: Path) -> Choice | None:
    """None where nothing is known, or nothing that can be read."""
    try:
        choice = msgspec.json.decode(_file(key, folder).read_bytes(), type=Choice)
    except (OSError, ValueError):
        return None
    return choice if choice.key == dict(key) and choice.name in choice.seconds else None


def remember(choice: Choice, folder: Path) -> None:
    """Best effort: a folder that cannot be written costs the next start a measurement."""
    path = _file(choice.key, folder)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=path.stem)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(choice))
        os.replace(name, path)
