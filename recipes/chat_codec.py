"""Messages to ids and back through a model's chat template.

Owns the rendering of later turns: the policy's own ids stay as they are, and what the template
writes between an answer and the next one is appended. A last message of the assistant's is the
beginning of the policy's answer. Ignores environments.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trainer_bridge.environment import Message

ANSWER = "\x00answer\x00"


class ChatCodec:
    """`trainer_bridge.environment.TextCodec` over a tokenizer with a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], *, first: bool) -> list[int]:
        begun = messages[-1].content if messages and messages[-1].role == "assistant" else None
        asked = messages if begun is None else messages[:-1]
        said = [{"role": message.role, "content": message.content} for message in asked]
        if first:
            return self._ids(self._template(said) + (begun or ""))
        # What follows an answer is read off a conversation that has one: its end mark was sampled.
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": ANSWER}]
        rest = self._template(before + said).split(ANSWER, 1)[1]
        return self._ids(rest.removeprefix(str(self._tokenizer.eos_token)) + (begun or ""))

    def decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str), "one sequence decodes to one text"
        return text

    def _template(self, messages: list[dict[str, str]]) -> str:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str), "one conversation renders to one text"
        return text

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
