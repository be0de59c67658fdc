"""What one request asks of sampling, checked once and frozen. Imports no torch.

Every field is validated here, so nothing behind it checks again. Limits are as wide as float32 logits can
honour; whoever speaks a narrower dialect (a server's API) narrows them there.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ddtree.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Constraint", "SamplingParams"]

# Of divisors and of shifts: beyond them float32 logits overflow or lose their own digits.
SMALLEST, LARGEST = 1e-4, 1e4
# Token ids and counts are int64 in tensors.
LARGEST_INT = 2**63 - 1


@runtime_checkable
class Constraint(Protocol):
    """A grammar as a pure automaton: states are values, and no method changes one.

    Tree nodes are judged in states derived from the committed one, and most of those branches are thrown
    away; a method that moved a shared state would let a rejected draft into the committed text.
    """

    def start(self) -> Hashable:
        """The state before the first output token."""
        ...

    def allowed(self, state: Hashable) -> Tensor | None:
        """Which tokens may follow: bool [V], at least one of them true. None allows every token."""
        ...

    def advance(self, state: Hashable, token: int) -> Hashable:
        """The state after an allowed token. `state` itself stays valid."""
        ...


class _Shifts(Mapping[int, float]):
    """A mapping that nobody changes and that, unlike a MappingProxyType, other processes can be sent."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[int, float]) -> None:
        self._values = values

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end. Raises RequestError.

    temperature: 0 is greedy. top_k, top_p, min_p: 0, 1 and 0 are off; greedy requests ignore them.
    repetition_penalty counts prompt and output, 1 is off; presence_penalty and frequency_penalty count the
    output alone, 0 is off. logit_bias: token id to a shift of its logit. seed: any 64-bit integer, signed or
    not, kept unsigned; a request without one draws its own. stop: one string is accepted as well.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "temperature": _temperature(self.temperature),
            "top_k": _integer("top_k", self.top_k, 0, LARGEST_INT, "use 0 to keep every token"),
            "top_p": _number("top_p", self.top_p, 0, 1, "use 1 to keep every token"),
            "min_p": _number("min_p", self.min_p, 0, 1, "use 0 to keep every token"),
            "logit_bias": _bias(self.logit_bias),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, LARGEST_INT, "ask for at least one token"),
            "stop": _stop(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids),
        }
        name = "repetition_penalty"
        checked[name] = _number(name, self.repetition_penalty, SMALLEST, LARGEST, "use 1 to turn it off")
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = _number(name, getattr(self, name), -LARGEST, LARGEST, "use 0 to turn it off")
        if self.seed is not None:
            seed = _integer("seed", self.seed, -(2**63), 2**64 - 1, "leave it out for a random one")
            checked["seed"] = seed % 2**64
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false: got {reprlib.repr(self.ignore_eos)}")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise RequestError(
                "constraint must have the methods start, allowed and advance: "
                f"got {type(self.constraint).__name__}; see ddtree.speculation.params.Constraint"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without noise."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether scores depend on the tokens that came before, beyond what the model has seen."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the argmax of the raw logits is the choice."""
        return self.greedy and not self.needs_history and not self.logit_bias and self.constraint is None

    def ends(self, eos_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end this request: the model's own, unless they are ignored, and those asked for."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError when a token id lies outside the model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = sorted(token for token in ids if token >= vocab_size)
            if outside:
                raise RequestError(
                    f"{name} names token {outside[0]}, but this model's vocabulary ends at "
                    f"{vocab_size - 1}: use ids of this model's tokenizer"
                )


def _number(name: str, value: Any, low: float, high: float, mend: str) -> float:
    """A finite number in [low, high]: NaN compares false, so it is refused with the rest."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}: got {reprlib.repr(value)}; {mend}")
    return float(value)


def _temperature(value: Any) -> float:
    temperature = _number("temperature", value, 0, LARGEST, "use 0 for greedy decoding")
    if 0 < temperature < SMALLEST:
        raise RequestError(
            f"temperature {temperature:g} is too small: logits divided by it overflow; "
            f"use 0 for greedy decoding, or at least {SMALLEST:g}"
        )
    return temperature


def _integer(name: str, value: Any, low: int, high: int, mend: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}: got {reprlib.repr(value)}; {mend}")
    return value


def _bias(value: Any) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers: got {type(value).__name__}")
    mend = "give the tokenizer's id"
    return _Shifts(
        {
            _integer("a token id in logit_bias", token, 0, LARGEST_INT, mend): _number(
                f"logit_bias[{token}]", shift, -LARGEST, LARGEST, f"-{LARGEST:g} bans a token for good"
            )
            for token, shift in value.items()
        }
    )


def _stop(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) for text in strings):
        raise RequestError(f"stop must be a string or a list of strings: got {reprlib.repr(value)}")
    if "" in strings:
        raise RequestError("stop holds an empty string, which would end every answer at once: leave it out")
    return tuple(strings)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"stop_token_ids must be a list of token ids: got {reprlib.repr(value)}")
    mend = "give the tokenizer's ids"
    return tuple(_integer("a token id in stop_token_ids", token, 0, LARGEST_INT, mend) for token in value)
