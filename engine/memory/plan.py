"""Who gets how much of the device's memory.

Owns the division: parts with a fixed need come first, what is left is divided over the parts that grow. Every
part is a number of units of some bytes and the reason for it. Ignores where the needs come from
(`engine.memory.needs`) and how a part lies in memory.

A page of keys and values brings its share of window pages and of snapshots with it, so that one division
sizes all three: `WINDOW_SHARE` tokens of windowed layers for a token, and snapshots worth `SNAPSHOT_SHARE` of
a page's bytes, at most one a page, since no more can be of use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from engine.errors import InvalidRequest

WINDOW_SHARE = 0.5
"""Cached tokens whose window pages are kept too. Running rows have theirs in any case."""

SNAPSHOT_SHARE = 0.5
"""Bytes of snapshots for a byte of keys and values."""

ROWS_SHARE = 0.5
"""Where rows are not given, as many run as leave this part of the memory to what is cached."""

PER_SEQUENCE = 2
"""State slots that a sequence holds: the live one, and the newest at a page's end."""

SNAPSHOTS_PER_ROW = 4
"""Kept in any case where the size of the pool is given."""


@dataclass(frozen=True, slots=True)
class Share:
    """`units` of `unit_bytes` each; `why` says what they follow from."""

    name: str
    units: int
    unit: str
    unit_bytes: int
    why: str

    @property
    def bytes(self) -> int:
        return self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """What units take, in bytes; 0 where a model has no such thing. `reserve` lists what a number of running
    rows needs whatever is cached. `window` is in tokens, the one that looks included."""

    token_bytes: int
    reserve: Callable[[int], tuple[Share, ...]]
    draft_token_bytes: int = 0
    window_token_bytes: int = 0
    window: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings that a division follows; None is "auto". With `spare_rows` fewer than `max_running` will
    do. `useful_tokens` bounds what can be of use (None: no bound)."""

    page_size: int
    fraction: float
    max_running: int
    spare_rows: bool
    lookahead: int
    prefill_tokens: int
    kv_tokens: int | None = None
    window_tokens: int | None = None
    state_slots: int | None = None
    useful_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`shares` of the `available_bytes` that were free after the weights; what grows had `fraction` of what
    the others left."""

    available_bytes: int
    fraction: float
    max_running: int
    shares: tuple[Share, ...]
    host_bytes: int = 0
    """Of the host's memory, for what is evicted."""

    def units(self, name: str) -> int:
        """Units of a part; 0 where there is none."""
        return sum(share.units for share in self.shares if share.name == name)

    @property
    def planned_bytes(self) -> int:
        return sum(share.bytes for share in self.shares)

    def to_dict(self) -> dict[str, object]:
        shares = [asdict(share) | {"bytes": share.bytes} for share in self.shares]
        return {
            "available_bytes": self.available_bytes,
            "planned_bytes": self.planned_bytes,
            "fraction": self.fraction,
            "max_running": self.max_running,
            "shares": shares,
            "host_bytes": self.host_bytes,
        }

    def lines(self) -> list[str]:
        """One for the whole, then one for each part."""
        head = f"memory: {_size(self.planned_bytes)} planned of {_size(self.available_bytes)} free after the weights"
        parts = [
            f"  {share.name}: {share.units} {share.unit} in {_size(share.bytes)} ({share.why})" for share in self.shares
        ]
        if self.host_bytes:
            parts.append(f"  on the host: up to {_size(self.host_bytes)} for what is evicted (cache.host_mib)")
        return [head, *parts]


def divide(needs: Needs, wanted: Wanted, available: int) -> MemoryPlan:
    """Raises `InvalidRequest`, naming the setting and what would fit, where something does not."""
    rows = _rows(needs, wanted, available)
    wanted = replace(wanted, max_running=rows)
    reserve = needs.reserve(rows)
    room = int((available - sum(share.bytes for share in reserve)) * wanted.fraction)
    live = _live_slots(rows) if needs.state_bytes else 0
    tokens = _tokens(needs, wanted, room - live * needs.state_bytes) if wanted.kv_tokens is None else wanted.kv_tokens
    tokens = tokens // wanted.page_size * wanted.page_size
    grown = _grown(needs, wanted, tokens, live)
    plan = MemoryPlan(available, wanted.fraction, rows, (*grown, *(share for share in reserve if share.units)))
    _check(plan, needs, wanted)
    return plan


def window_least(needs: Needs, wanted: Wanted) -> int:
    """Window tokens that running rows and a prompt being computed may need at once. A row has its own window and
    holds the one before its cached prefix ends."""
    row = 2 * needs.window + wanted.lookahead + 2 * wanted.page_size
    return wanted.max_running * row + wanted.prefill_tokens


def _live_slots(rows: int) -> int:
    """Slots of the running rows, and of a quarter as many sequences that prefill or wait to be forked."""
    return PER_SEQUENCE * (rows + -(-rows // 4))


def _rows(needs: Needs, wanted: Wanted, available: int) -> int:
    rows = wanted.max_running
    while wanted.spare_rows and rows > 1:
        reserved = sum(share.bytes for share in needs.reserve(rows))
        room = (available - reserved) * wanted.fraction
        live = _live_slots(rows) * needs.state_bytes if wanted.state_slots is None else 0
        if reserved <= available * ROWS_SHARE and live <= room * ROWS_SHARE:
            break
        rows -= max(1, rows // 16)
    return rows


def _snapshot_bytes(needs: Needs, wanted: Wanted) -> float:
    """Bytes of snapshots that a page brings with it."""
    if wanted.state_slots is not None:
        return 0
    share = WINDOW_SHARE if wanted.window_tokens is None else 0
    token = needs.token_bytes + needs.draft_token_bytes + share * needs.window_token_bytes
    return min(needs.state_bytes, SNAPSHOT_SHARE * wanted.page_size * token)


def _tokens(needs: Needs, wanted: Wanted, room: int) -> int:
    """Tokens of keys and values that fit `room`, beside live states, with all that they bring."""
    window, least = needs.window_token_bytes, window_least(needs, wanted)
    if wanted.window_tokens is not None:
        room, window = room - wanted.window_tokens * window, 0
    if wanted.state_slots is not None:
        room -= (wanted.state_slots - _live_slots(wanted.max_running)) * needs.state_bytes
    token = needs.token_bytes + needs.draft_token_bytes + _snapshot_bytes(needs, wanted) / wanted.page_size
    # A window page for every page, then as many as running rows need, then a share.
    tokens = room / (token + window)
    if window and tokens > least:
        tokens = min(max(least, (room - least * window) / token), least / WINDOW_SHARE)
        tokens = max(tokens, room / (token + WINDOW_SHARE * window)) if tokens >= least / WINDOW_SHARE else tokens
    tokens = max(0, int(tokens))
    return tokens if wanted.useful_tokens is None else min(tokens, wanted.useful_tokens)


def _grown(needs: Needs, wanted: Wanted, tokens: int, live: int) -> list[Share]:
    why = "given" if wanted.kv_tokens is not None else f"{wanted.fraction:g} of what the fixed parts leave"
    if wanted.kv_tokens is None and tokens + wanted.page_size > (wanted.useful_tokens or 1 << 62):
        why = "all that can be of use"
    shares = [Share("kv", tokens, "tokens", needs.token_bytes, why)]
    if needs.draft_token_bytes:
        why = "the drafter's, under the same pages"
        shares.append(Share("draft_kv", tokens, "tokens", needs.draft_token_bytes, why))
    if needs.window_token_bytes:
        least, why = window_least(needs, wanted), "given"
        window = wanted.window_tokens
        if window is None:
            window = min(tokens, max(least, int(WINDOW_SHARE * tokens)))
            why = f"{WINDOW_SHARE:g} of the tokens" if window > least else f"windows of {needs.window} of running rows"
        window = window // wanted.page_size * wanted.page_size
        shares.append(Share("window_kv", window, "tokens", needs.window_token_bytes, why))
    if needs.state_bytes:
        slots, why = wanted.state_slots, "given"
        if slots is None:
            kept = int(tokens // wanted.page_size * _snapshot_bytes(needs, wanted) / needs.state_bytes)
            kept = kept if wanted.kv_tokens is None else max(kept, SNAPSHOTS_PER_ROW * wanted.max_running)
            slots, why = live + kept, f"{live} of running rows, {kept} snapshots"
        shares.append(Share("states", slots, "slots", needs.state_bytes, why))
    return shares


_FIELDS = {"kv": "cache.kv_tokens", "window_kv": "cache.window_tokens", "states": "cache.state_slots"}
"""The settings that give the parts' sizes."""


def _check(plan: MemoryPlan, needs: Needs, wanted: Wanted) -> None:
    given = {"kv": wanted.kv_tokens, "window_kv": wanted.window_tokens, "states": wanted.state_slots}
    least = {"kv": wanted.page_size, "window_kv": 2 * wanted.page_size, "states": 2 * PER_SEQUENCE}
    over = plan.planned_bytes - plan.available_bytes
    for share in sorted(plan.shares, key=lambda share: -share.bytes):
        asked = given.get(share.name)
        if asked is not None and over > 0:
            # What a drafter keeps grows with the tokens.
            unit = share.unit_bytes + (needs.draft_token_bytes if share.name == "kv" else 0)
            fits = max(0, share.units - -(-over // unit))
            raise InvalidRequest(field=_FIELDS[share.name], expected=_expected(plan, share, fits), actual=asked)
        if share.name in least and share.units < least[share.name]:
            if asked is not None:
                low = f"at least {least[share.name]} {share.unit}"
                raise InvalidRequest(field=_FIELDS[share.name], expected=low, actual=asked)
            _refuse_rest(plan, wanted)
    if over > 0:
        _refuse_rest(plan, wanted)


def _expected(plan: MemoryPlan, share: Share, fits: int) -> str:
    others = ", ".join(f"{other.name} {_size(other.bytes)}" for other in plan.shares if other is not share)
    return f"at most {fits} {share.unit} of {share.unit_bytes} bytes, which fit {_size(plan.available_bytes)}" + (
        f" beside {others}" if others else ""
    )


def _refuse_rest(plan: MemoryPlan, wanted: Wanted) -> None:
    """What was not given does not fit beside what rows need."""
    parts = ", ".join(f"{share.name} {_size(share.bytes)}" for share in plan.shares)
    raise InvalidRequest(
        field="scheduler.max_running",
        expected=f"fewer rows, or fewer scheduler.prefill_tokens than {wanted.prefill_tokens}: of"
        f" {_size(plan.available_bytes)} free the cache has {wanted.fraction:g} of what the rest leaves ({parts})",
        actual=plan.max_running,
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"
