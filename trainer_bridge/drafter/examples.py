"""What a drafter is trained on: sequences whose answers the target itself wrote.

Owns one example, its checks and the append-only file that responses are kept in while they are made.
Ignores text, where answers come from (`trainer_bridge.drafter.responses`) and the target's states
(`trainer_bridge.drafter.features`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from engine.errors import InvalidRequest
from trainer_bridge.samples import TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class DraftExample:
    """`ids` uint32 [T]; `mask` bool [T], true on tokens the target sampled. `key` is unique in its set and
    names the example wherever it goes; `domain` is what evaluations are split by."""

    key: str
    domain: str
    ids: np.ndarray
    mask: np.ndarray
    policy_version: int = 0

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.mask):
            raise InvalidRequest(field=f"{self.key}.mask", expected=f"{len(self.ids)} values", actual=len(self.mask))
        if len(self.ids) and self.mask[0]:
            raise InvalidRequest(field=f"{self.key}.mask", expected="no label at position 0", actual=True)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_supervised(self) -> int:
        return int(self.mask.sum())

    def answers(self) -> list[np.ndarray]:
        """The ids of each supervised stretch."""
        return [self.ids[start:end] for start, end in stretches(self.mask)]


def from_sample(sample: TrainingSample, domain: str) -> DraftExample:
    """A rollout's sample: its loss mask is the supervision, multi-turn or not."""
    prompt = np.asarray(sample.prompt_ids, np.uint32)
    return DraftExample(
        key=f"{sample.group_id}/{sample.index}",
        domain=domain,
        ids=np.concatenate((prompt, np.asarray(sample.output_ids, np.uint32))),
        mask=np.concatenate((np.zeros(len(prompt), bool), sample.loss_mask)),
        policy_version=sample.oldest_version if sample.spans else 0,
    )


def stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of every run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask.astype(bool), [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def keep_supervised(examples: Iterable[DraftExample]) -> tuple[list[DraftExample], int]:
    """The examples that have something to learn, and how many had not. Raises `InvalidRequest` where none has:
    a run over them would report a loss of zero."""
    examples = list(examples)
    kept = [example for example in examples if example.num_supervised]
    if not kept:
        raise InvalidRequest(
            field="examples", expected="an example with a supervised token", actual=f"none in {len(examples)}"
        )
    return kept, len(examples) - len(kept)


class StoredExample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a response file; `answers` are [start, end) of the supervised stretches."""

    key: str
    domain: str
    ids: list[int]
    answers: list[tuple[int, int]]
    policy_version: int = 0


class ExampleLog:
    """Examples appended as lines; what was written stays through a crash, but for a torn last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self.path = path
        self.keys = {example.key for example in read_examples(path)} if path.exists() else set()
        self._encoder = msgspec.json.Encoder()

    def append(self, examples: Sequence[DraftExample]) -> None:
        """Durable when it returns. A key that is there already is not written again."""
        fresh = [example for example in examples if example.key not in self.keys]
        with self.path.open("ab") as file:
            for example in fresh:
                file.write(self._encoder.encode(_stored(example)) + b"\n")
                self.keys.add(example.key)
            file.flush()
            os.fsync(file.fileno())


def read_examples(path: Path) -> Iterator[DraftExample]:
    """Raises `InvalidRequest` naming file, line and field."""
    decoder = msgspec.json.Decoder(StoredExample)
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidRequest(field=str(path), expected="a readable file of examples", actual=error) from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                stored = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidRequest(field=f"{path}:{number}", expected="a stored example", actual=error) from error
            mask = np.zeros(len(stored.ids), bool)
            for start, end in stored.answers:
                if not 0 < start < end <= len(mask):
                    expected = f"stretches within 1..{len(mask)}"
                    raise InvalidRequest(field=f"{path}:{number} answers", expected=expected, actual=(start, end))
                mask[start:end] = True
            if stored.ids and not 0 <= min(stored.ids) <= max(stored.ids) < 2**32:
                raise InvalidRequest(field=f"{path}:{number} ids", expected="ids of 32 bits", actual=stored.ids)
            ids = np.asarray(stored.ids, np.uint32)
            yield DraftExample(stored.key, stored.domain, ids, mask, stored.policy_version)


def _stored(example: DraftExample) -> StoredExample:
    return StoredExample(
        key=example.key,
        domain=example.domain,
        ids=example.ids.tolist(),
        answers=stretches(example.mask),
        policy_version=example.policy_version,
    )


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        with path.open("r+b") as file:
            file.truncate(end)
