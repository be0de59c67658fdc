"""The target's tokenizer and chat template, reduced to what the project needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddtree.errors import CheckpointError, RequestError

__all__ = ["ChatTokenizer"]

Message = Mapping[str, Any]
# A word that no template contains: it marks where the user's words begin.
MARK = "\x02here\x02"


class ChatTokenizer:
    """Text to ids and back, and chats to ids through the model's own template.

    Special tokens inside user text are treated by the tokenizer's own rules; nothing is added to plain prompts.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{folder}: no usable tokenizer ({reason}); fetch its files again") from None

    @property
    def backend(self) -> Any:
        """The Hugging Face tokenizer itself, for libraries that need one."""
        return self._tokenizer

    @property
    def chat_template(self) -> str:
        """The model's chat template; empty where it has none."""
        template = self._tokenizer.chat_template or ""
        return (
            template if isinstance(template, str) else str(template.get("tool_use") or template.get("default", ""))
        )

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The rendered prompt: the template with the generation prompt at its end.

        tools: as OpenAI describes them. variables: further ones that the template knows. RequestError when the
        model has no template, or one that refuses the messages.
        """
        if not self.can_chat:
            raise RequestError("this model has no chat template; pass the prompt as plain text")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except Exception as error:  # noqa: BLE001 - templates are programs of others: they refuse in ways of their own
            raise RequestError(f"the model's chat template refuses these messages: {error}") from None
        return str(text)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the rendered prompt."""
        return self.encode(self.chat_text(messages))

    def user_prefix(self) -> list[int]:
        """Ids of the template up to where the first user message's words begin."""
        return self.encode(self.chat_text([{"role": "user", "content": MARK}]).split(MARK)[0])

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of some ids, special tokens left out."""
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text of some ids, special tokens included: for looking at prompts and trees."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
