"""What an engine is asked, and what a caller gets: pieces while a request runs, a completion at its end, and
records of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import Policy

__all__ = ["Completion", "Gathering", "Job", "Piece", "RoundRecord", "Timing", "TokenLogprob"]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: token ids, sampling, who plans its rounds, whether rounds are recorded, and how many of the
    likeliest tokens are reported with each token (0: the chosen one alone; None: nothing)."""

    prompt: Sequence[int]
    params: SamplingParams
    policy: Policy
    records: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round as it was: the tree's arrays (real nodes alone), the committed path, and the tokens it emitted.

    would_commit: in shadow mode, the tokens that the tree would have committed.
    """

    mode: str
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    would_commit: int | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target held a token, in the log-softmax of its own logits, before any setting of the request.

    top: the likeliest tokens and their log-probabilities, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The newest part of an answer. The first piece comes from the prompt itself, all others from a round each.

    finish_reason: of the last piece, `stop` or `length`; else None. would_commit: in shadow mode, the tokens that
    the round's tree would have committed. record: where records were asked for. logprobs: where they were asked
    for, one for each of token_ids.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    would_commit: int | None = None
    record: RoundRecord | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. prefill_s ends with the first token; decode_s covers all that follow."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. Only emitted tokens count in any of its figures.

    finish_reason: `stop` (an end token or a stop string), `length` (max_tokens or a full context), or `cancelled`
    when the request was left before its end. rounds: verifications after the first token, which the prompt's own
    pass gave. would_commit: in shadow mode, the tokens that trees would have committed in all rounds.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    rounds: int
    timing: Timing
    records: tuple[RoundRecord, ...] = ()
    would_commit: int | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per round, bonus included; None without a round."""
        return (len(self.token_ids) - 1) / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens after the first, over the time that they took; None without any."""
        decoded = len(self.token_ids) - 1
        return decoded / self.timing.decode_s if decoded and self.timing.decode_s > 0 else None


class Gathering:
    """Pieces on their way to a completion. Times are the engine's clock, read as each piece arrives."""

    def __init__(self, prompt_tokens: int, started_s: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._times_s = [started_s]
        self._pieces: list[Piece] = []

    def add(self, piece: Piece, now_s: float) -> None:
        self._pieces.append(piece)
        self._times_s.append(now_s)

    def completion(self) -> Completion:
        """The answer so far; a request that was left before its end counts as cancelled."""
        shadowed = [p.would_commit for p in self._pieces if p.would_commit is not None]
        first_s = self._times_s[1] if self._pieces else self._times_s[0]
        return Completion(
            text="".join(p.text for p in self._pieces),
            token_ids=tuple(t for p in self._pieces for t in p.token_ids),
            finish_reason=(self._pieces[-1].finish_reason if self._pieces else None) or "cancelled",
            prompt_tokens=self._prompt_tokens,
            rounds=max(len(self._pieces) - 1, 0),
            timing=Timing(first_s - self._times_s[0], self._times_s[-1] - first_s),
            records=tuple(p.record for p in self._pieces if p.record is not None),
            would_commit=sum(shadowed) if shadowed else None,
        )
