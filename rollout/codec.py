"""Bytes of the rollout service: MessagePack with typed arrays.

Owns encoding, decoding and the dtype each column has on arrival. Ignores what bodies say
(`rollout.protocol`) and how they travel. An array is extension 1: dtype u8, rank u8, dims u32[],
zeros up to a multiple of 8 bytes, then little-endian elements in C order. It decodes to a
read-only view of the body, which therefore stays alive as long as the array does (and need not
be aligned to the element size). NaN and infinities travel as they are.
"""

from __future__ import annotations

import functools
import math
import re
import struct
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine.errors import InvalidRequest, SparkrollError
from rollout.wire_limits import ARRAY_EXT, DEFAULT_LIMITS, WireLimits, check_structure

T = TypeVar("T")

BF16 = np.dtype([("bf16", "<u2")])
"""Raw bits of bfloat16; `array.view("<u2")` gives them as numbers."""
F8_E4M3 = np.dtype([("f8_e4m3", "u1")])
F8_E5M2 = np.dtype([("f8_e5m2", "u1")])

_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    3: np.dtype("<u4"),
    4: np.dtype("<u8"),
    5: np.dtype("i1"),
    6: np.dtype("<i2"),
    7: np.dtype("<i4"),
    8: np.dtype("<i8"),
    9: np.dtype("<f2"),
    10: np.dtype("<f4"),
    11: np.dtype("<f8"),
    12: BF16,
    13: F8_E4M3,
    14: F8_E5M2,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_RANK = 8
_DIMS = [struct.Struct(f"<{rank}I") for rank in range(_MAX_RANK + 1)]
_ZEROS = bytes(8)

# A column's name says its dtype and rank: one word, one meaning.
_COLUMNS: dict[str, tuple[np.dtype, int]] = {
    "ids": (np.dtype("<u4"), 1),
    "prompt_ids": (np.dtype("<u4"), 1),
    "sequences": (np.dtype("<u4"), 1),
    "top_ids": (np.dtype("<u4"), 2),
    "logprobs": (np.dtype("<f4"), 1),
    "extra_logprobs": (np.dtype("<f4"), 1),
    "prompt_logprobs": (np.dtype("<f4"), 1),
    "top_logprobs": (np.dtype("<f4"), 2),
    "entropy": (np.dtype("<f4"), 1),
    "data": (np.dtype("u1"), 1),
}
_ECHO_BYTES = 64 * 1024


def encode(value: Any) -> bytes:
    """The MessagePack bytes of a struct, container or array.

    Raises `InvalidRequest` where a value has no encoding: a lone surrogate in a string, an
    integer beyond 64 bits, an array dtype outside the enumeration.
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(field="body", expected="text without lone surrogates", actual=error.object) from error
    except (OverflowError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(field="body", expected="an encodable value", actual=error) from error


def decode(data: bytes | bytearray | memoryview, kind: type[T], limits: WireLimits = DEFAULT_LIMITS) -> T:
    """The value of type `kind` in `data`: checked against the limits, then against the schema.

    Columns arrive with the dtype their name implies; ids may also be a plain list of integers.
    Raises `TooLarge` or `InvalidRequest` naming the field.
    """
    body = data if isinstance(data, bytes) else bytes(data)
    check_structure(body, limits)
    try:
        value = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(field="body", expected="well-formed MessagePack", actual=error) from error
    visit = _visitor(kind, "")
    return value if visit is None else visit(value, ())


def as_ids(field: str, value: Any) -> np.ndarray:
    """Token ids from a list, array or tensor, as uint32 [T]. Raises `InvalidRequest`."""
    try:
        if isinstance(value, list):
            # Turns are joined from what callers hold: plain numbers and a reply's NumPy ids.
            value = [item.item() if isinstance(item, np.integer) else item for item in value]
        array = _array_hook(np.ndarray, value if isinstance(value, list) else np.asarray(value))
    except ValueError as error:
        raise InvalidRequest(field=field, expected="ids in [0, 2**32)", actual=error) from error
    return _as_column("ids", array, ((), f".{field}"))


def pack_array(array: np.ndarray) -> msgspec.msgpack.Ext:
    """`array` as extension 1; other byte orders and layouts are converted."""
    code = _CODES.get(array.dtype)
    if code is None:
        array = array.astype(array.dtype.newbyteorder("<"))
        code = _CODES.get(array.dtype)
    if code is None or array.ndim > _MAX_RANK:
        raise TypeError(f"arrays of {array.dtype} and rank {array.ndim} do not travel")
    header = struct.pack(f"<BB{array.ndim}I", code, array.ndim, *array.shape)
    header += bytes(-len(header) % 8)
    contiguous = np.ascontiguousarray(array)
    content = contiguous.reshape(-1).view(np.uint8).data if array.size else b""
    return msgspec.msgpack.Ext(ARRAY_EXT, b"".join((header, content)))


def unpack_array(data: memoryview | bytes) -> np.ndarray:
    """The read-only view of extension 1 content. Raises `ValueError` unless it is exact."""
    if len(data) < 2:
        raise ValueError("expected a typed array, got a cut header")
    dtype, rank = _DTYPES.get(data[0]), data[1]
    if dtype is None:
        raise ValueError(f"expected a known dtype code, got {data[0]}")
    used = 2 + 4 * rank
    start = (used + 7) & ~7
    if rank > _MAX_RANK or len(data) < start:
        raise ValueError(f"expected a rank of at most {_MAX_RANK} and its dims, got rank {rank}")
    shape = _DIMS[rank].unpack_from(data, 2)
    size = math.prod(shape) * dtype.itemsize
    if len(data) - start != size or data[used:start] != _ZEROS[: start - used]:
        raise ValueError(f"expected {size} bytes for {dtype.name} {list(shape)}, got {len(data) - start}")
    array = np.ndarray(shape, dtype, data, start)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return pack_array(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not travel")


def _extension_hook(code: int, data: memoryview) -> np.ndarray | ValueError:
    """The array, or what is wrong with it: only `_array_hook` can raise with the field's path."""
    if code != ARRAY_EXT:
        return ValueError(f"Expected `extension {ARRAY_EXT}`, got `{code}`")
    try:
        return unpack_array(data)
    except ValueError as error:
        return error


def _array_hook(kind: type, value: Any) -> Any:
    """What stands in an array field: an array, or a plain list of ids."""
    if kind is not np.ndarray:
        raise TypeError(f"no decoding for {kind}")
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, list):
        raise ValueError(f"Expected `array`, got `{type(value).__name__}`")
    if any(kinds := set(map(type, value)) - {int}):
        index = next(i for i, item in enumerate(value) if type(item) in kinds)
        raise ValueError(f"Expected `int`, got `{_brief(value[index])}` (element {index})")
    if value and (min(value) < 0 or max(value) >= 2**32):
        index = next(i for i, item in enumerate(value) if not 0 <= item < 2**32)
        raise ValueError(f"Expected `an id in [0, 2**32)`, got `{value[index]}` (element {index})")
    ids = np.array(value, dtype="<u4")
    ids.flags.writeable = False
    return ids


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)


@functools.lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(kind, ext_hook=_extension_hook, dec_hook=_array_hook)


Path = tuple  # () at the root, else (parent path, "key")
Visitor = Callable[[Any, Path], Any]


@functools.lru_cache(maxsize=1024)
def _visitor(kind: Any, name: str) -> Visitor | None:
    """A function that gives every array below a value of `kind` its column's dtype, or None
    where there can be no array. `name` is the field that holds the value."""
    if kind is np.ndarray:
        return functools.partial(_as_column, name)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _union_visitor(arguments, name)
    if origin is list or origin is dict:
        inner = _visitor(arguments[-1], name)
        return None if inner is None else functools.partial(_visit_items, inner)
    base = origin or kind
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        fields = [(field.name, _visitor(field.type, field.name)) for field in msgspec.structs.fields(kind)]
        found = [(field, visit) for field, visit in fields if visit is not None]
        return functools.partial(_visit_struct, found) if found else None
    return None


def _union_visitor(members: tuple[Any, ...], name: str) -> Visitor | None:
    visits = {typing.get_origin(m) or m: v for m in members if (v := _visitor(m, name)) is not None}

    def visit(value: Any, path: Path) -> Any:
        inner = visits.get(type(value))
        return value if inner is None else inner(value, path)

    return visit if visits else None


def _visit_items(inner: Visitor, values: Any, path: Path) -> Any:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        values[key] = inner(value, (path, f"[{key!r}]"))
    return values


def _visit_struct(fields: list[tuple[str, Visitor]], value: Any, path: Path) -> Any:
    for name, visit in fields:
        before = getattr(value, name)
        after = visit(before, (path, f".{name}"))
        if after is not before:
            msgspec.structs.force_setattr(value, name, after)
    return value


def _as_column(name: str, array: np.ndarray, path: Path) -> np.ndarray:
    dtype, rank = _COLUMNS.get(name, (array.dtype, array.ndim))
    if array.ndim != rank:
        raise InvalidRequest(field=_dotted(path), expected=f"rank {rank}", actual=f"shape {list(array.shape)}")
    if array.dtype == dtype:
        return array
    if dtype.kind == "f" and array.dtype.kind == "f":
        converted = array.astype(dtype)
    elif dtype.itemsize == 4 and dtype.kind == "u" and array.dtype.kind in "iu":
        outside = (array < 0) | (array > np.iinfo(dtype).max)
        if outside.any():
            raise InvalidRequest(
                field=_dotted(path), expected="ids in [0, 2**32)", actual=int(array[outside].reshape(-1)[0])
            )
        converted = array.astype(dtype)
    else:
        raise InvalidRequest(field=_dotted(path), expected=f"an array of {dtype.name}", actual=array.dtype.name)
    converted.flags.writeable = False
    return converted


def _dotted(path: Path) -> str:
    parts: list[str] = []
    while path:
        path, part = path
        parts.append(part)
    return "".join(reversed(parts)).lstrip(".") or "body"


def _refusal(message: str, body: bytes) -> SparkrollError:
    """The typed error for a schema violation that msgspec describes in words."""
    text, _, place = message.partition(" - at `")
    place = place.removesuffix("`")
    field = place.removeprefix("$").lstrip(".") or "body"
    unknown = re.match(r"Object contains unknown field `(.*)`", text, re.DOTALL)
    missing = re.match(r"Object missing required field `(.*)`", text, re.DOTALL)
    if unknown or missing:
        inner = (unknown or missing)[1]  # type: ignore[index]
        full = inner if field == "body" else f"{field}.{inner}"
        expected, actual = ("no such field", "unknown field") if unknown else ("a value", "missing")
        return InvalidRequest(field=full, expected=expected, actual=actual)
    found = re.match(r"[Ee]xpected (.*), got (.*)", text, re.DOTALL)
    expected, actual = (found[1], found[2]) if found else ("a valid value", text)
    value = _value_at(place, body)
    return InvalidRequest(field=field, expected=expected, actual=actual if value is _NOTHING else value)


_NOTHING = object()


def _value_at(place: str, body: bytes) -> Any:
    """The scalar an error is about, so that the message can show it; small bodies only."""
    if len(body) > _ECHO_BYTES or not place.startswith("$"):
        return _NOTHING
    try:
        value = msgspec.msgpack.decode(body, strict=False)
        for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", place[1:]):
            value = value[name] if name else value[int(index)]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return _NOTHING
    return value if isinstance(value, (int, float, str, bool)) else _NOTHING


def _brief(value: Any) -> str:
    return f"{type(value).__name__} {ascii(value)[:40]}"
