"""The target's tokenizer and chat template, reduced to what the project needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError

from ddtree.errors import CheckpointError, RequestError

__all__ = ["ChatTokenizer"]

Message = Mapping[str, str]
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
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def chat_text(self, messages: Sequence[Message]) -> str:
        """The rendered prompt: the template with the generation prompt at its end. RequestError when the model has
        no template, or one that refuses the messages."""
        if not self.can_chat:
            raise RequestError("this model has no chat template; pass the prompt as plain text")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (
            TemplateError
        ) as error:  # templates refuse what they cannot render: a system message, two user turns
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
