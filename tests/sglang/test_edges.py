"""Edge correction on the real SGLang: the trees are the embedded engine's, and the text stays what it was."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.errors import CheckpointError
from ddtree.models.edges import EDGES_FILE, EdgeNet, EdgeTables, save_edges
from ddtree.models.load import load_drafter, load_target
from ddtree.ops import select_ops
from ddtree.sglang_plugin.settings import COUPLING_SCALE, Flags, resolve
from ddtree.speculation.chooser import Chooser
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.protocols import Lengths, Proposal
from ddtree.tree import best_chain, build_tree
from tests.sglang import models
from tests.sglang.engines import forget, said, serving

PROMPT, COUNT, BLOCK, BUDGET = [10, 11, 12, 13, 14, 15, 16, 17], 18, 8, 9
HEATS = (0.002, 30.0)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scene:
    """A target, a drafter without edges and one with, and what the target says."""

    folder: Path
    truth: list[int]
    steps: list[models.Step]

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def rig(self) -> Path:
        return self.folder / "rig"

    def tables(self) -> EdgeTables:
        """The edge correction as the embedded engine has it."""
        edges = load_drafter(self.folder / "edged", load_target(self.target, torch.float32)).edges
        assert edges is not None
        return edges


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return set_scene(tmp_path_factory.mktemp("edges"))


def set_scene(folder: Path) -> Scene:
    """Every true token but the first is the drafter's second choice, so a small budget goes astray at once. The
    edges know which token follows which."""
    target = models.write_target(folder / "target", "qwen3")
    truth = models.greedy(target, PROMPT, COUNT + BLOCK)
    models.write_drafter(folder / "plain", BLOCK)
    models.write_drafter(folder / "edged", BLOCK)
    models.write_edges(folder / "edged", target, [truth])
    steps = models.foresight(truth, decoy=1)
    models.write_oracle(folder / "rig", {tuple(PROMPT): steps})
    return Scene(folder, truth, steps)


@dataclass(frozen=True)
class Seen:
    """What one server did: its greedy rounds, what `/server_info` says, sampled answers by temperature."""

    mode: str
    entries: list[dict[str, Any]]
    facts: dict[str, Any]
    sampled: dict[float, dict[str, Any]]


def watch(scene: Scene, drafter: str, mode: str, **fields: Any) -> Seen:
    with launched(scene, drafter, mode, **fields) as engine:
        return look(scene, engine, mode)


def launched(scene: Scene, drafter: str, mode: str, **fields: Any) -> AbstractContextManager[Any]:
    flags = Flags(mode=mode, budget=None if mode == "chain" else BUDGET)
    return serving(scene.rig, scene.target, scene.folder / drafter, flags, **fields)


def look(scene: Scene, engine: Any, mode: str) -> Seen:
    entries = rounds(scene, engine)
    facts = engine.get_server_info()["internal_states"][0]["ddtree"]
    sampled = {heat: said(engine, [PROMPT], COUNT, temperature=heat, sampling_seed=5)[0] for heat in HEATS}
    return Seen(mode, entries, facts, sampled)


@pytest.fixture(scope="module")
def unedged(scene: Scene) -> Seen:
    return watch(scene, "plain", "tree")


@pytest.fixture(scope="module", params=["tree", "chain", "shadow-linear"])
def edged(scene: Scene, unedged: Seen, request: pytest.FixtureRequest) -> Seen:
    del unedged  # two engines of one process must not run at once
    return watch(scene, "edged", request.param)


def rounds(scene: Scene, engine: Any) -> list[dict[str, Any]]:
    """Answer greedily, as Hugging Face does, and return what the drafter saw and said in each round."""
    record = scene.rig / "record.jsonl"
    record.touch()
    try:
        forget(engine)
        assert said(engine, [PROMPT], COUNT)[0]["output_ids"] == scene.truth[:COUNT]
        return [json.loads(line) for line in record.read_text().splitlines()]
    finally:
        record.unlink()


def committed(entries: Sequence[dict[str, Any]]) -> list[int]:
    """How many tokens each round but the last committed."""
    lengths = [entry["prefix"][0] for entry in entries]
    return [later - length for length, later in itertools.pairwise(lengths)]


def expected(scene: Scene, entries: Sequence[dict[str, Any]], mode: str, tables: EdgeTables | None) -> list[int]:
    """The same by the embedded engine's own chooser and builder."""
    chooser = Chooser([SamplingParams(temperature=0)], models.VOCABULARY, select_ops(CPU), CPU, BLOCK, None)
    counts = []
    for entry in entries:
        length, anchors = entry["prefix"][0], torch.tensor(entry["anchor"])
        first = length + 1 - len(PROMPT)
        logits = torch.zeros(1, BLOCK - 1, models.VOCABULARY)
        for depth, step in enumerate(scene.steps[first : first + BLOCK - 1]):
            for token, logit in step:
                logits[0, depth, token] = logit
        states = torch.tensor(entry["states"])

        def edges(tokens: Tensor, anchors: Tensor = anchors, states: Tensor = states) -> Tensor:
            assert tables is not None
            return tables(anchors, tokens, states)

        proposal = Proposal(logits, None if tables is None else edges)
        history, lengths = chooser.begin([PROMPT]), Lengths(torch.tensor([length]), (length,))
        candidates = chooser.candidates(proposal, history, lengths, BUDGET if mode == "tree" else 1)
        future = scene.truth[first : first + BLOCK - 1]
        if mode == "tree":
            counts.append(1 + _reached(build_tree(candidates, anchors, BUDGET), future))
        else:
            chain = best_chain(candidates)[0][0].tolist()
            right = [token == truth for token, truth in zip(chain, future, strict=True)]
            counts.append(1 + [*right, False].index(False))
    return counts


def _reached(tree: Any, future: Sequence[int]) -> int:
    """How many of the coming tokens lie on a path of the tree."""
    node = 0
    for depth, token in enumerate(future):
        children = [
            n
            for n in range(1, int(tree.sizes_R[0]))
            if tree.parents_RN[0, n] == node and tree.tokens_RN[0, n] == token
        ]
        if not children:
            return depth
        node = children[0]
    return len(future)


def test_every_round_commits_what_the_embedded_engines_core_would(scene: Scene, edged: Seen) -> None:
    with_edges = expected(scene, edged.entries, edged.mode, scene.tables())
    assert committed(edged.entries) == with_edges[:-1]
    without = expected(scene, edged.entries, edged.mode, None)
    assert sum(with_edges) > sum(without) + 3, "the edges make true branches win"
    assert edged.facts["edges"] is True
    if edged.mode == "shadow-linear":
        grown = expected(scene, edged.entries, "tree", scene.tables())
        assert edged.facts["would_accept_length"] == sum(grown) / len(grown)


def test_a_drafter_without_the_file_drafts_as_before(scene: Scene, unedged: Seen) -> None:
    assert committed(unedged.entries) == expected(scene, unedged.entries, "tree", None)[:-1]
    assert unedged.facts["edges"] is False


def test_sampled_answers_are_those_without_edges(edged: Seen, unedged: Seen) -> None:
    """What is said is a function of seed and position, whichever tree it was found in; the first token, which
    SGLang's prefill draws, one of the servers' random seed, which is the same."""
    for heat in HEATS:
        assert edged.sampled[heat]["output_ids"] == unedged.sampled[heat]["output_ids"]


def test_sampled_drafts_follow_the_edges(scene: Scene, edged: Seen, unedged: Seen) -> None:
    """Where it is cold the target keeps to the text that the edges know."""
    assert edged.sampled[HEATS[0]]["output_ids"] == scene.truth[:COUNT]
    one, other = (seen.sampled[HEATS[0]]["meta_info"]["spec_verify_ct"] for seen in (edged, unedged))
    assert one < other


@pytest.mark.parametrize(("heat", "coupled"), [(0.0, True), (0.5, True), (0.5, False)])
def test_candidates_are_those_of_the_embedded_engine(heat: float, coupled: bool) -> None:
    """Ranking, noise, and the scale of edges at every temperature, with coupled drafts and without."""
    from ddtree.sglang_plugin.choices import Chooser as PluginChooser
    from ddtree.sglang_plugin.edges import edge_tables
    from ddtree.sglang_plugin.head import DraftHead
    from tests.sglang.test_rounds import Records

    torch.manual_seed(4)
    weight, embedding, hidden = torch.randn(40, 8), torch.randn(40, 8), torch.randn(2, 3, 8)
    tables, anchors = edge_tables(EdgeNet(8, 6, 5), embedding.__getitem__, 40), torch.tensor([3, 30])
    lengths = Lengths(torch.tensor([4, 9]), (4, 9))
    params = [SamplingParams(temperature=heat, seed=seed) for seed in (1, 2)]
    ops = select_ops(CPU)
    own = Chooser(params, 40, ops, CPU, 4, COUPLING_SCALE if coupled else None)
    info = SimpleNamespace(
        temperatures=torch.full((2, 1), heat or 1.0),
        top_ks=torch.full((2,), 1 << 30 if heat else 1),
        top_ps=torch.ones(2),
        min_ps=torch.zeros(2),
        need_top_k_sampling=not heat,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        is_all_greedy=not heat,
    )
    head = DraftHead(
        SimpleNamespace(weight=weight),
        40,
        SimpleNamespace(world_size=1),
        SimpleNamespace(output_multiplier=1.0, final_logit_softcapping=None),
        ops,
    )
    settings = resolve(Flags(budget=6, coupled=coupled), block_size=4, num_draft_tokens=None, hybrid=False)
    plugin = PluginChooser(head, tables, 40, settings, Records(), None, False)
    found = plugin.candidates(anchors, hidden, 6, plugin.turn(info, torch.tensor([1, 2]), lengths.device_R))
    proposal = Proposal(hidden @ weight.T, lambda tokens: tables(anchors, tokens, hidden))
    wanted = own.candidates(proposal, own.begin([[1], [2]]), lengths, 6)
    assert torch.equal(found.tokens_RDSK, wanted.tokens_RDSK)
    torch.testing.assert_close(found.log_probs_RDSK, wanted.log_probs_RDSK, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("damage", ["bytes", "shape"])
def test_a_broken_file_ends_the_launch_with_its_name(toys: dict[str, Path], tmp_path: Path, damage: str) -> None:
    from ddtree.sglang_plugin.launch import settle
    from tests.sglang.host import Launch

    drafter = models.write_drafter(tmp_path / "drafter")
    if damage == "bytes":
        (drafter / EDGES_FILE).write_bytes(b"no tensors")
    else:
        save_file({"mix.weight": torch.zeros(3, 4)}, drafter / EDGES_FILE)
    with pytest.raises(CheckpointError, match=rf"{EDGES_FILE}: not an edge net for hidden size 64 .*remove it"):
        settle(Launch(toys, Flags(), drafter=drafter))


def test_the_file_of_a_hub_drafter_is_found_where_sglang_keeps_it(tmp_path: Path) -> None:
    from ddtree.sglang_plugin.edges import draft_edges, weights_folder

    repository = tmp_path / "models--owner--drafter"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    arguments = SimpleNamespace(
        speculative_draft_model_path="owner/drafter",
        speculative_draft_model_revision=None,
        download_dir=str(tmp_path),
    )
    assert weights_folder(arguments) is None
    (snapshot / "config.json").write_text("{}")
    assert weights_folder(arguments) is None, "the configuration comes before the weights"
    save_file({"a": torch.zeros(1)}, snapshot / "model.safetensors")
    assert weights_folder(arguments) == snapshot
    assert draft_edges(arguments, 8, torch.float32, CPU) is None
    save_edges(snapshot, EdgeNet(8, 6, 5))
    net = draft_edges(arguments, 8, torch.float32, CPU)
    assert net is not None
    assert net.table_width == 11
    arguments.speculative_draft_model_path = "s3://bucket/drafter"
    assert draft_edges(arguments, 8, torch.float32, CPU) is None


def test_tables_made_in_parts_are_the_whole_vocabularys(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.sglang_plugin import edges

    torch.manual_seed(5)
    net, embedding = EdgeNet(8, 6, 5), torch.randn(10, 8)
    monkeypatch.setattr(edges, "PART", 4)
    found = edges.edge_tables(net, embedding.__getitem__, 10)
    tokens, states, anchors = torch.tensor([[[9, 0, 4], [3, 8, 1]]]), torch.randn(1, 2, 8), torch.tensor([7])
    wanted = EdgeTables(net, [embedding])(anchors, tokens, states)
    torch.testing.assert_close(found(anchors, tokens, states), wanted)
