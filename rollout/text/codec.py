"""Prompts to ids and ids to text, for one model folder.

Owns the tokenizer and the chat template. Ignores generation: ids that a caller sends are run as
they are and never come here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequest, Unsupported
from rollout.protocol import ChatMessage
from rollout.text.detokenizer import IncrementalDetokenizer
from rollout.text.token_bytes import DecodingStream, TableStream, read_byte_table
from rollout.text.validation import utf8

TOKENIZER_FILE = "tokenizer.json"


class TextCodec:
    """Wraps the `tokenizer.json` of a Hugging Face folder, exactly as it stands.

    `tokenizer_config.json` and `chat_template.jinja` are read where they exist. Nothing is
    downloaded and no code of the folder runs. Safe to share between threads.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        if not (folder / TOKENIZER_FILE).is_file():
            raise InvalidRequest(field="tokenizer", expected=f"{TOKENIZER_FILE} in {folder}", actual="none")
        try:
            self._wrapped = PreTrainedTokenizerFast.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise InvalidRequest(field=str(folder / TOKENIZER_FILE), expected="a tokenizer", actual=error) from error
        self._tokenizer: Tokenizer = self._wrapped.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._table = read_byte_table(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """Tokens known, added ones included; a model may have more."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_id(self) -> int | None:
        return self._wrapped.eos_token_id  # type: ignore[return-value]

    @property
    def has_chat_template(self) -> bool:
        return self._wrapped.chat_template is not None

    def encode(self, text: str, field: str = "text") -> np.ndarray:
        """uint32 ids, with the special tokens that the tokenizer puts around a plain text."""
        utf8(text, field)
        return self._ids(text, add_special_tokens=True)

    def apply_chat(
        self, messages: Sequence[ChatMessage | Mapping[str, str]], add_generation_prompt: bool = True
    ) -> np.ndarray:
        """uint32 ids of a conversation, up to where the assistant's next words begin."""
        return self._ids(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[ChatMessage | Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model's template writes it."""
        if not self.has_chat_template:
            raise Unsupported(field="messages", expected="a model with a chat template", actual="a model without one")
        if not messages:
            raise InvalidRequest(field="messages", expected="at least one message", actual="none")
        plain = [_plain(message) for message in messages]
        for index, message in enumerate(plain):
            for key, value in message.items():
                utf8(value, f"messages[{index}].{key}")
        try:
            rendered = self._wrapped.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(field="messages", expected="what the chat template takes", actual=error) from error
        assert isinstance(rendered, str)
        return rendered

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens, ending before a character that is cut off."""
        return IncrementalDetokenizer(self).push(ids)

    def byte_stream(self) -> TableStream | DecodingStream:
        """A fresh stream of the bytes of one text."""
        return TableStream(self._table) if self._table is not None else DecodingStream(self._tokenizer)

    def _ids(self, text: str, add_special_tokens: bool) -> np.ndarray:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return np.asarray(encoding.ids, dtype=np.uint32)


def _plain(message: ChatMessage | Mapping[str, str]) -> dict[str, str]:
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": message.content}
    return dict(message)
