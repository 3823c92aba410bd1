"""Configuration: frozen trees of values, from TOML plus dotted overrides.

Owns the engine's own settings and the loader every package uses for its settings. Ignores what
recipes and the service configure; their dataclasses live next to their owners.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine.dspark.config import DSparkConfig
from engine.errors import InvalidRequest
from lora.config import AdapterConfig

Auto = Literal["auto"]
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`page_size` in tokens. `kv_tokens` is the size of the key/value pool, `window_tokens` that of the layers that
    look through a window (0: they keep every page), `state_slots` the recurrent states kept. "auto" divides
    `memory_fraction` of the device memory left after the weights and what steps and captured graphs need (on the
    CPU, at most room for `max_running` whole contexts). With `canary`, every so many steps everything cached or
    free is read and compared with what it was: writes that go astray are found and named, at a price that only
    debugging pays. `host_mib` of host memory (pinned, with a GPU) keep what is evicted, to come back as hits."""

    page_size: int = 16
    kv_tokens: int | Auto = "auto"
    window_tokens: int | Auto = "auto"
    state_slots: int | Auto = "auto"
    memory_fraction: float = 0.5
    prefix_cache: bool = True
    canary: int = 0
    host_mib: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_running` bounds the samples decoded together, `max_waiting` the samples queued
    before new groups are refused as overloaded, `prefill_tokens` the prompt tokens computed in
    one step beside decoding, `lookahead` the tokens reserved ahead of every running sample,
    `burst` the decode steps that the overlapped loop launches at once. While prompts wait it computes
    up to `prefill_burst` times `prefill_tokens` of them between two decode steps: more fills the
    batch sooner, so that fewer steps run half empty; fewer keeps the wait of decoding rows short.
    "auto" rows and prompt tokens are what keeps the device busy: 512 and 8192 on a GPU, 64 and 512 on the CPU,
    and fewer rows where memory is short."""

    max_running: int | Auto = "auto"
    max_waiting: int = 8192
    prefill_tokens: int | Auto = "auto"
    lookahead: int = 16
    burst: int = 8
    prefill_burst: int = 4


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`dtype` "auto" is the checkpoint's own on a GPU, and bfloat16 weights stay bfloat16 on the
    CPU. `loop` is "serial" (every step visible at once: CPUs, debugging) or "overlapped" (the
    device runs ahead of the host); "auto" is serial on the CPU and for a deterministic engine with
    a drafter. `deterministic` makes a row's bits independent of its batch. `num_threads` None leaves torch as it
    is."""

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    loop: str = "auto"
    deterministic: bool = False
    num_threads: int | None = None
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    dspark: DSparkConfig = DSparkConfig()
    adapters: AdapterConfig = AdapterConfig()


def number(value: int | Auto) -> int:
    """A setting that has been resolved."""
    assert isinstance(value, int), f"{value!r} was never resolved"
    return value


def load_config(
    kind: type[C], toml: Path | None = None, overrides: list[str] | None = None, base: C | None = None
) -> C:
    """Build `kind` from a TOML file, then `a.b=value` overrides (values are TOML, or bare text).

    Settings that neither names come from `base`, or else are `kind`'s defaults; "none" is None where a
    setting may be that. Unknown keys and wrong types raise `InvalidRequest` naming the dotted key.
    """
    tree: dict[str, Any] = {}
    if toml is not None:
        try:
            tree = tomllib.loads(Path(toml).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise InvalidRequest(field=str(toml), expected="a readable TOML file", actual=error) from error
    for item in overrides or []:
        key, separator, text = item.partition("=")
        if not separator:
            raise InvalidRequest(field=item, expected="key=value", actual=item)
        node = tree
        *parents, leaf = key.strip().split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise InvalidRequest(field=key, expected="a table at every parent", actual=node)
        node[leaf] = _parse_value(text.strip())
    return _build(kind, tree, "", base)


def describe(config: Any, prefix: str = "") -> list[str]:
    """One `dotted.key = value` line per setting, for printing."""
    lines = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            lines += describe(value, f"{prefix}{item.name}.")
        else:
            lines.append(f"{prefix}{item.name} = {value!r}")
    return lines


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(kind: type, tree: Any, prefix: str, base: Any = None) -> Any:
    if not isinstance(tree, dict):
        raise InvalidRequest(field=prefix.rstrip("."), expected="a table", actual=tree)
    hints = typing.get_type_hints(kind)
    known = {item.name for item in dataclasses.fields(kind)}
    unknown = sorted(set(tree) - known)
    if unknown:
        raise _unknown(kind, prefix, unknown[0])
    values = {
        name: _setting(hints[name], value, prefix + name, getattr(base, name, None)) for name, value in tree.items()
    }
    try:
        return kind(**values) if base is None else dataclasses.replace(base, **values)
    except TypeError as error:
        raise InvalidRequest(
            field=prefix.rstrip(".") or kind.__name__, expected="all required keys", actual=error
        ) from error


def _unknown(kind: type, prefix: str, name: str) -> InvalidRequest:
    """Names the settings whose own names are nearest, those in tables further in among them."""
    keys = list(_keys(kind))
    likeness = {key: difflib.SequenceMatcher(None, name, key.rpartition(".")[2]).ratio() for key in keys}
    best = max(likeness.values())
    near = sorted((key for key in keys if likeness[key] == best >= 0.7), key=lambda key: key.count("."))
    where = f"{prefix.rstrip('.')} has" if prefix else "there are"
    others = where + " " + ", ".join(sorted(key for key in keys if "." not in key))
    hint = f"did you mean {' or '.join(prefix + key for key in near[:3])}?" if near else others
    return InvalidRequest(
        f"{prefix}{name}: there is no such setting; {hint}",
        field=prefix + name,
        expected=prefix + near[0] if near else others,
        actual=prefix + name,
    )


def _keys(kind: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings, tables included."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        yield prefix + item.name
        hint = hints[item.name]
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                yield from _keys(typing.cast(type, inner), f"{prefix}{item.name}.")


def _setting(hint: Any, value: Any, key: str, base: Any) -> Any:
    if value == "none" and _matches(hint, None):
        return None
    if dataclasses.is_dataclass(base):
        return _build(type(base), value, f"{key}.", base)
    return _coerce(hint, value, key)


def _coerce(hint: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, f"{key}.")
    if _matches(hint, value):
        return value
    if _matches(hint, 0.5) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if _matches(hint, Path()) and isinstance(value, str):
        return Path(value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        element = typing.get_args(hint)[0]
        return tuple(_coerce(element, item, f"{key}[{i}]") for i, item in enumerate(value))
    raise InvalidRequest(field=key, expected=_expected(hint), actual=value)


def _expected(hint: Any) -> str:
    """What a setting may be, for people."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_expected, members))
    if origin is Literal:
        return " or ".join(map(repr, members))
    if origin is tuple:
        return f"a list of {_expected(members[0])}"
    return "none" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _matches(hint: Any, value: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(member, value) for member in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_matches(typing.get_args(hint)[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is Any:
        return True
    if hint is type(None):
        return value is None
    if not isinstance(hint, type):
        return False
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, hint)
