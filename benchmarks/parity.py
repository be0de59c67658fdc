"""How often rounding alone changes a choice: one row against many, and against plain decode in a batch of two.

    python benchmarks/parity.py --out benchmarks/results/parity.json

A matrix product of one row and of N rows may round differently, so a choice may flip where the two best logits
are closer than that. On the same greedy text, every position is judged by one-row decoding, by passes of N rows (a
chain of the text's own tokens with random siblings, as a tree has them), and, as the control, by one-row decoding
of two sequences at once. A flip is explained when the gap between its two best logits is at most twice the largest
difference between the two evaluations at that position; an unexplained flip is a fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import load_prompts, write_result
from torch import Tensor

from ddtree import LLM, EngineConfig, SamplingParams
from ddtree.models.target import TargetModel
from ddtree.ops import Rows
from ddtree.speculation.protocols import Lengths
from ddtree.speculation.verifier import TargetVerifier
from ddtree.tree import DraftTree, chain_words


@dataclass
class Tally:
    """Positions compared, flips among them, flips that rounding does not explain, and the largest difference."""

    positions: int = 0
    flips: int = 0
    exact_ties: int = 0
    unexplained: int = 0
    largest_difference: float = 0.0
    smallest_gap: float = float("inf")

    def add(self, one_PV: Tensor, many_PV: Tensor) -> None:
        one_PV, many_PV = one_PV.float(), many_PV.float()
        top_P2 = one_PV.topk(2, dim=-1).values
        gap_P = top_P2[:, 0] - top_P2[:, 1]
        difference_P = (one_PV - many_PV).abs().amax(dim=-1)
        flipped_P = one_PV.argmax(-1) != many_PV.argmax(-1)
        self.positions += gap_P.numel()
        self.flips += int(flipped_P.sum())
        self.exact_ties += int((flipped_P & (gap_P == 0)).sum())
        self.unexplained += int((flipped_P & (gap_P > 2 * difference_P)).sum())
        self.largest_difference = max(self.largest_difference, float(difference_P.max()))
        self.smallest_gap = min(self.smallest_gap, float(gap_P.min()))

    def report(self) -> dict[str, Any]:
        return vars(self) | {"flips_per_1000": 1000 * self.flips / max(self.positions, 1)}


@torch.inference_mode()
def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"task": options.task, "prompts": options.limit, "max_tokens": options.max_tokens}
    for dtype in ("float32", "bfloat16"):
        llm = LLM(options.model, dtype=dtype, device=options.device, config=EngineConfig(mode="off"))
        tallies = {name: Tally() for name in ("batch-2", *(f"rows-{n}" for n in options.rows))}
        for number, text in enumerate(load_prompts(options.task, options.limit)):
            ids = llm.encode(text)
            said = list(llm.generate(ids, SamplingParams(max_tokens=options.max_tokens)).token_ids)
            one_PV = torch.cat(list(one_row(llm.engine.target, ids, said, 1)))
            tallies["batch-2"].add(one_PV, torch.cat(list(one_row(llm.engine.target, ids, said, 2))))
            for rows in options.rows:
                tallies[f"rows-{rows}"].add(one_PV, torch.cat(list(many_rows(llm.engine.target, ids, said, rows))))
            print(f"{dtype}: prompt {number + 1} of {options.limit}", flush=True)
        report[dtype] = {name: tally.report() for name, tally in tallies.items()}
        for name, tally in report[dtype].items():
            print(
                f"{dtype} {name:8} {tally['flips']} flips in {tally['positions']} positions "
                f"({tally['flips_per_1000']:.2f} per 1,000; {tally['exact_ties']} exact ties, "
                f"{tally['unexplained']} unexplained), largest difference {tally['largest_difference']:.2g}"
            )
    write_result(Path(options.out), report)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 17, 65])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def one_row(target: TargetModel, prompt: list[int], said: list[int], sequences: int) -> Iterator[Tensor]:
    """Logits after every said token but the last, one row of each sequence at a time; the first one's count."""
    device = target.device
    cache = target.new_cache(sequences, len(prompt) + len(said) + 1)
    tokens_RN = torch.tensor([prompt] * sequences, device=device)
    length = 0
    for chunk in (tokens_RN, *(torch.full((sequences, 1), t, device=device) for t in said[:-1])):
        count = chunk.shape[1]
        rows = Rows(
            tokens_RN=chunk,
            positions_RN=torch.arange(length, length + count, device=device).expand(sequences, -1),
            lengths_R=torch.full((sequences,), length, device=device),
            words_RNW=chain_words(sequences, count, device),
            span=length + count,
        )
        hidden, _ = target(rows, cache)
        if length:
            yield target.logits(hidden[:, -1:])[0]
        length += count


def many_rows(target: TargetModel, prompt: list[int], said: list[int], rows: int) -> Iterator[Tensor]:
    """The same logits from passes of `rows` rows: as many of the text's tokens as half of them hold, with random
    siblings in the other half."""
    device = target.device
    cache = target.new_cache(1, len(prompt) + len(said) + rows + 1)
    verifier = TargetVerifier(target, cache, ())
    verifier.prefill([prompt], at(0, device))
    generator = torch.Generator().manual_seed(0)
    depth = max(rows // 2, 1)
    start = 0
    while start < len(said) - 1:
        chain = said[start : min(start + depth, len(said) - 1)]
        verification = verifier.verify(
            comb(chain, rows, target.spec.vocab_size, generator, device), at(len(prompt) + start, device)
        )
        yield verification.logits_RNV[0, : len(chain)]
        # A chain's own path already lies in its places; the siblings behind it are overwritten.
        start += len(chain)


def comb(
    chain: list[int], rows: int, vocabulary: int, generator: torch.Generator, device: torch.device
) -> DraftTree:
    """A chain as the first rows, then siblings of its nodes with random tokens."""
    tokens, parents, depths = list(chain), [0, *range(len(chain) - 1)], list(range(len(chain)))
    while len(tokens) < rows:
        parent = (len(tokens) - len(chain)) % len(chain)
        tokens.append(int(torch.randint(vocabulary, (1,), generator=generator)))
        parents.append(parent)
        depths.append(parent + 1)
    return DraftTree(
        tokens_RN=torch.tensor([tokens], device=device),
        parents_RN=torch.tensor([parents], device=device),
        depths_RN=torch.tensor([depths], device=device),
        scores_RN=torch.zeros(1, len(tokens), device=device),
        sizes_R=torch.tensor([len(tokens)], device=device),
        horizon=len(chain),
    )


def at(length: int, device: torch.device) -> Lengths:
    return Lengths(torch.tensor([length], device=device), (length,))


if __name__ == "__main__":
    main()
