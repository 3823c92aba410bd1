"""How an engine speculates.

Owns the settings and what their values may be. Ignores checkpoints (`engine.dspark.build`) and what is
decided from step to step (`engine.dspark.planner`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from engine.dspark.drafter import DrafterTraits

Rule = Literal["coupled", "rejection"]
Mode = Literal["compact", "static", "cap_accept"]
NGRAM = "ngram"
NGRAM_DRAFTS = 8
"""Drafts a round of an n-gram drafter, unless told."""


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """`drafter` is a checkpoint folder, "ngram" for drafts from a request's own past, or "none".

    `rule` "coupled" draws the very tokens that would be drawn without drafts, so that a seed keeps its
    promise; "rejection" keeps more drafts of one that knows its probabilities, and promises the same
    distribution. `mode` "compact" verifies as many drafts as are expected to pay, "static" whole
    windows always, "cap_accept" whole windows too, of which it keeps what "compact" would have
    verified: it shows what trimming costs and yields data for calibration.

    `drafts` bounds a request's drafts a round (None: all that the drafter makes), `least` is verified
    whenever a step drafts at all. Drafting is off above `max_rows` requests and for requests longer
    than `max_context` tokens; while it does not pay it is tried again every `probe_every` steps.
    `calibration` holds temperatures of confidences (None: `sts-RULE.json` of the drafter's folder, where
    there is one), refitted every `recalibrate_every` steps (0: never). Step times are measured at the start
    for `sweep_seconds` at most and refined by every step; `cost` is the file that they are kept in and read
    from, which must be of such an engine (None: a GPU's under the user's cache folder, a CPU's nowhere).
    `keep_states` keeps what the drafter reads of the target, and what the target's head reads, for every
    cached token: a trainer in this process learns from it (`Engine.drafting`).
    """

    drafter: str = "none"
    rule: Rule = "coupled"
    mode: Mode = "compact"
    drafts: int | None = None
    least: int = 0
    max_rows: int | None = None
    max_context: int | None = None
    probe_every: int = 64
    calibration: Path | None = None
    recalibrate_every: int = 512
    cost: Path | None = None
    sweep_seconds: float = 2.0
    keep_states: bool = False

    @property
    def enabled(self) -> bool:
        return self.drafter != "none"


def check_config(config: DSparkConfig) -> None:
    """Raise `InvalidRequest`, naming the setting, for values that mean nothing."""
    for name, kind in (("rule", Rule), ("mode", Mode)):
        if getattr(config, name) not in get_args(kind):
            raise InvalidRequest(
                field=f"dspark.{name}", expected=f"one of {get_args(kind)}", actual=getattr(config, name)
            )
    lowest = {"least": 0, "probe_every": 1, "recalibrate_every": 0, "max_rows": 1, "max_context": 1}
    for name, low in lowest.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise InvalidRequest(field=f"dspark.{name}", expected=f"{low} or more", actual=value)
    if not 0 <= config.sweep_seconds <= 600:
        raise InvalidRequest(field="dspark.sweep_seconds", expected="from 0 to 600", actual=config.sweep_seconds)
    if config.drafts is not None and config.drafts < 1:
        raise InvalidRequest(field="dspark.drafts", expected="1 or more", actual=config.drafts)


def check_drafter(drafter: str, field: str = "dspark.drafter") -> None:
    """Raise `InvalidRequest` for what names neither a kind of drafter nor a folder that is there."""
    if drafter not in ("none", NGRAM) and not Path(drafter).is_dir():
        raise InvalidRequest(field=field, expected=f"'none', '{NGRAM}' or a drafter's folder", actual=drafter)


def number_of_drafts(config: DSparkConfig, traits: DrafterTraits) -> int:
    """The most drafts of a round, refused beyond what the drafter makes."""
    drafts = traits.max_drafts if config.drafts is None else config.drafts
    if not 1 <= drafts <= traits.max_drafts:
        raise InvalidRequest(
            field="dspark.drafts", expected=f"1 to the drafter's {traits.max_drafts}", actual=config.drafts
        )
    if config.least > drafts:
        raise InvalidRequest(field="dspark.least", expected=f"at most the {drafts} drafts", actual=config.least)
    return drafts
