"""A walk over a MessagePack body that allocates nothing, run before anything is decoded.

Owns the limits a body must keep: size, depth, lengths, number of objects, known extension codes,
no trailing bytes. Ignores what the body means (`rollout.codec`). Every announced length is
checked against the bytes that are really there, so a few bytes cannot claim gigabytes; the walk
is a loop, so no nesting exhausts the stack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import InvalidRequest, TooLarge

ARRAY_EXT = 1


@dataclass(frozen=True, slots=True)
class WireLimits:
    """`array` bounds one array and all objects of a body together: a decoded object weighs up to
    a hundred times its encoding, so only a bound on their number bounds the memory."""

    body_bytes: int = 64 * 2**20
    depth: int = 16
    map_entries: int = 4096
    array: int = 2**22
    containers: int = 2**17


DEFAULT_LIMITS = WireLimits()


def _sizes() -> tuple[int, ...]:
    """Bytes taken by a value of each leading byte; 0 where more must be read to know."""
    sizes = [0] * 256
    sizes[0x00:0x80] = [1] * 128
    sizes[0xA0:0xC0] = [1 + length for length in range(32)]
    sizes[0xC0] = sizes[0xC2] = sizes[0xC3] = 1
    sizes[0xE0:0x100] = [1] * 32
    for code, size in {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.items():
        sizes[code] = size
    for code, size in {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.items():
        sizes[code] = size
    return tuple(sizes)


_SIZES = _sizes()
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXT_LENGTH_BYTES = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_BYTES = {0xC1, *_LENGTH_BYTES, *_EXT_LENGTH_BYTES, *_FIXED_EXT}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}

# Long lists of numbers are walked by the regular expression engine, many elements at a time.
_NUMBER = rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8})"
_RUNS = [(count, re.compile(_NUMBER + b"{%d}+" % count, re.DOTALL)) for count in (4096, 64)]
_RUN_FROM = 64


def check_structure(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> None:
    """Raise `TooLarge` or `InvalidRequest` unless `data` is one value within the limits."""
    total = len(data)
    if total > limits.body_bytes:
        raise TooLarge(field="body", expected=f"at most {limits.body_bytes} bytes", actual=total)
    sizes = _SIZES
    position, remaining, objects, containers = 0, 1, 0, 0
    parents: list[int] = []
    try:
        while remaining or parents:
            while remaining:
                size = sizes[data[position]]
                if not size:
                    break
                position += size
                remaining -= 1
            else:
                if parents:
                    remaining = parents.pop()
                continue
            code = data[position]
            if code in _BYTES:
                position = _skip_bytes(data, position, code)
                remaining -= 1
                continue
            parents.append(remaining - 1)
            if code <= 0x9F:
                remaining = code & 0x0F if code >= 0x90 else 2 * (code & 0x0F)
                position += 1
            else:
                position, remaining = _open_container(data, position, code, limits)
            containers += 1
            objects += remaining
            if containers > limits.containers or objects > limits.array:
                bounds = f"at most {limits.array} objects and {limits.containers} containers"
                raise TooLarge(field="body", expected=bounds, actual="more")
            if len(parents) > limits.depth:
                raise InvalidRequest(field="body", expected=f"depth at most {limits.depth}", actual="deeper")
            if remaining >= _RUN_FROM:
                position, remaining = _skip_runs(data, position, remaining)
    except IndexError:
        raise _truncated(total) from None
    _check_end(position, total)


def _skip_runs(data: bytes, position: int, remaining: int) -> tuple[int, int]:
    """Skip numbers from `position` on, in large strides; what is left is walked one by one."""
    for count, run in _RUNS:
        while remaining >= count and (match := run.match(data, position)):
            position = match.end()
            remaining -= count
    return position, remaining


def _open_container(data: bytes, position: int, code: int, limits: WireLimits) -> tuple[int, int]:
    """Position after a long header, and the number of values inside."""
    is_map = code in _MAPS
    width = _MAPS[code] if is_map else _ARRAYS[code]
    count, position = _length(data, position + 1, width)
    limit = limits.map_entries if is_map else limits.array
    if count > limit:
        kind = "map entries" if is_map else "array elements"
        raise TooLarge(field="body", expected=f"at most {limit} {kind}", actual=count)
    values = 2 * count if is_map else count
    if values > len(data) - position:
        raise _truncated(len(data))
    return position, values


def _skip_bytes(data: bytes, position: int, code: int) -> int:
    """Position after a string, binary or extension value."""
    if code in _LENGTH_BYTES:
        length, start = _length(data, position + 1, _LENGTH_BYTES[code])
    elif code in _EXT_LENGTH_BYTES or code in _FIXED_EXT:
        if code in _FIXED_EXT:
            length, start = _FIXED_EXT[code], position + 1
        else:
            length, start = _length(data, position + 1, _EXT_LENGTH_BYTES[code])
        if data[start] != ARRAY_EXT:
            raise InvalidRequest(field="body", expected=f"extension code {ARRAY_EXT}", actual=data[start])
        start += 1
    else:
        raise InvalidRequest(field="body", expected="MessagePack", actual=f"byte 0x{code:02x} at {position}")
    if length > len(data) - start:
        raise _truncated(len(data))
    return start + length


def _length(data: bytes, position: int, width: int) -> tuple[int, int]:
    end = position + width
    if end > len(data):
        raise _truncated(len(data))
    return int.from_bytes(data[position:end], "big"), end


def _check_end(position: int, total: int) -> None:
    if position > total:
        raise _truncated(total)
    if position < total:
        raise InvalidRequest(field="body", expected="one value", actual=f"{total - position} trailing bytes")


def _truncated(total: int) -> InvalidRequest:
    return InvalidRequest(field="body", expected="a whole MessagePack value", actual=f"cut off at {total} bytes")
