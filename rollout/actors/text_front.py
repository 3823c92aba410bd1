"""Text in and out of one engine.

Owns turning a call's text into token ids, its stop strings into watchers, and finished ids into
text, or refusing all of that by name where the model has no tokenizer. Ignores how tokenizers
and matching work (`rollout.text`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.errors import InvalidRequest, Unsupported
from engine.types import GroupRequest, SampleOutput
from engine.validation import check_samples
from rollout.protocol import GenerateCall

if TYPE_CHECKING:
    from rollout.text.codec import TextCodec
    from rollout.text.stop import StopStringWatcher

TOKENIZER_FILE = "tokenizer.json"


class ResumedWatcher:
    """The engine's `StopWatcher` over one sample's stop strings.

    An engine shows a resumed sample's ids first, in one call: text to match across, whose own
    matches are past and stop nothing.
    """

    def __init__(self, inner: StopStringWatcher, resumed: bool) -> None:
        self._inner = inner
        self._resumed = resumed

    def observe(self, new_ids: list[int]) -> tuple[int, str] | None:
        if self._resumed:
            self._resumed = False
            self._inner.prime(new_ids)
            return None
        return self._inner.observe(new_ids)

    def final_text(self) -> str:
        return self._inner.final_text()


@dataclass(slots=True)
class CallText:
    """One call's text: the request with its prompt as ids, watchers by sample index, and the codec
    that makes final texts where they are wanted."""

    request: GroupRequest
    watchers: Mapping[int, ResumedWatcher] = field(default_factory=dict)
    codec: TextCodec | None = None

    def finish(self, resumed: np.ndarray | None, sample: SampleOutput) -> str | None:
        """The whole text of a finished sample, what it was resumed from included."""
        if self.codec is None:
            return None
        watcher = self.watchers.get(sample.index)
        if watcher is not None:
            return watcher.final_text()
        ids = sample.ids if resumed is None else np.concatenate([resumed, sample.ids])
        return self.codec.decode(ids.tolist())


class TextFront:
    """`codec` None: token ids only."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec

    @classmethod
    def for_folder(cls, folder: Path) -> TextFront:
        """With the folder's tokenizer, where it has one. Only then is its library imported, which
        takes as long as the rest of an engine's start."""
        if not (folder / TOKENIZER_FILE).is_file():
            return cls(None)
        from rollout.text.codec import TextCodec

        return cls(TextCodec(folder))

    @property
    def available(self) -> bool:
        return self._codec is not None

    @property
    def chat(self) -> bool:
        """Whether `messages` can be served."""
        return self._codec is not None and self._codec.has_chat_template

    def read(self, call: GenerateCall) -> CallText:
        """Raises `Unsupported` or `InvalidRequest` naming the field that cannot be served."""
        request = self._with_prompt(call)
        codec = self._require("want_text") if call.want_text else None
        if not call.stop:
            return CallText(request, {}, codec)
        stops = self._require("stop")
        from rollout.text.stop import StopStringWatcher

        check_samples(request.n)
        resumed = {entry.index: bool(len(entry.ids)) for entry in request.resume or []}
        first = StopStringWatcher(stops, call.stop, call.keep_stop, request.sampling.min_new)
        watchers = {
            index: ResumedWatcher(first.sibling(), resumed.get(index, False))
            for index in (range(request.n) if request.resume is None else resumed)
        }
        return CallText(request, watchers, codec)

    def _with_prompt(self, call: GenerateCall) -> GroupRequest:
        request = call.request
        if call.text is None and call.messages is None:
            return request
        if len(request.prompt_ids) or (call.text is not None and call.messages is not None):
            raise InvalidRequest(field="prompt_ids", expected="one of prompt_ids, text, messages", actual="several")
        if call.text is not None:
            ids = self._require("text").encode(call.text)
        else:
            assert call.messages is not None
            ids = self._require("messages").apply_chat(call.messages)
        return msgspec.structs.replace(request, prompt_ids=ids)

    def _require(self, field: str) -> TextCodec:
        if self._codec is None:
            raise Unsupported(field=field, expected="token ids: this model has no tokenizer", actual="text")
        return self._codec
