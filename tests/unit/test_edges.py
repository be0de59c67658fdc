"""Edge correction: the same numbers through tables and net, on disk and off, in rounds and in training."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import save_file

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.errors import CheckpointError, ConfigError
from ddtree.models.edges import EDGES_FILE, EdgeNet, load_edges, save_edges
from ddtree.models.load import LoadedDrafter, load_drafter
from ddtree.models.save import save_drafter
from ddtree.speculation.chooser import Chooser
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.protocols import Lengths, Proposal
from ddtree.speculation.rescoring import EDGE_CANDIDATES
from ddtree.training.acceptance import Acceptance, measure_example, offer, rank_tokens
from ddtree.training.checkpoint import latest, read_state
from ddtree.training.edges import CANDIDATES, edge_loss
from ddtree.training.loss import Labels, decay_weights, loss_total
from ddtree.training.parallel import Group
from ddtree.training.start import load_edge_weights, new_drafter, new_edges
from ddtree.training.trainer import Trainer
from ddtree.tree import edge_candidates
from tests.checkpoints import drafter_config, write_drafter
from tests.drafters import pieces, plain_forward, records_of, tokens_of
from tests.toys import VOCABULARY, random_tokens, randomise, toy_drafter, toy_edges, toy_target
from tests.unit.test_trainer import CONFIG, write_examples

PROMPT = random_tokens(7, 1)
BUDGETS = (1, 4, 15, 16, 64)


@pytest.fixture(scope="module")
def loaded():
    """A target and a drafter with edges."""
    target = toy_target("qwen3")
    model, vocabulary = toy_drafter(target, layer_ids=(2, 0), block_size=8)
    return target, LoadedDrafter(model, vocabulary, toy_edges(vocabulary))


def engine_of(loaded, mode, budget=None, **changes):
    config = EngineConfig(mode=mode, budget=budget, max_context=400, **changes)
    return BatchEngine(*loaded, config, lambda tokens: "")


def answered(engine, params):
    return pieces(engine, PROMPT, params, engine.plan)


@torch.inference_mode()
def test_tables_say_what_the_net_says(loaded):
    """Row i of depth d belongs to candidate i of the depth before, and every row of depth 0 to the anchor."""
    _, drafter = loaded
    tokens_RDK = torch.randint(VOCABULARY, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    state_RDh = torch.randn(2, 3, 24, dtype=torch.float64)
    anchors_R = torch.tensor([4, 9])
    found_RDKK = drafter.edges(anchors_R, tokens_RDK, state_RDh)
    table = drafter.vocabulary.embedding
    for d in range(3):
        parents_RK = anchors_R[:, None].expand(-1, 5) if d == 0 else tokens_RDK[:, d - 1]
        wanted_RKK = drafter.edges.net(
            table[parents_RK][:, None], state_RDh[:, d : d + 1], table[tokens_RDK[:, d]][:, None]
        )[:, 0]
        torch.testing.assert_close(found_RDKK[:, d], wanted_RKK.float())
    assert found_RDKK.dtype == torch.float32
    assert found_RDKK.std() > 0.3, "edges that do next to nothing test nothing"


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("mode", ["chain", "tree", "shadow"])
def test_edges_change_drafts_and_never_the_text(loaded, mode, temperature):
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=3, repetition_penalty=1.2)
    plain = tokens_of(answered(engine_of(loaded, "off"), params))
    without = engine_of((loaded[0], dataclasses.replace(loaded[1], edges=None)), mode)
    for budget in (None,) if mode == "chain" else (1, 15, 64):
        engine = engine_of(loaded, mode, budget)
        answer = answered(engine, params)
        assert tokens_of(answer) == plain
    told = answered(without, params)
    drafts = [[record.tokens for record in records_of(a)] for a in (answer, told)]
    assert drafts[0] != drafts[1]


@torch.inference_mode()
def test_the_chain_is_the_spine_of_every_tree(loaded):
    """What comes after the best first token is what its own edges say, in the chain as in the tree."""
    _, drafter = loaded
    hidden_ADh = torch.randn(6, 7, 24, dtype=torch.float64)
    anchors_A = torch.arange(6)
    ranked = rank_tokens(drafter, hidden_ADh, 64)
    chain = offer(drafter, ranked, hidden_ADh, anchors_A, 1)
    wide = offer(drafter, ranked, hidden_ADh, anchors_A, 16)
    for one, other in ((chain.tokens_RDSK, wide.tokens_RDSK), (chain.log_probs_RDSK, wide.log_probs_RDSK)):
        assert torch.equal(one, other)
    assert not torch.equal(chain.states_RDSK[:, :, :, 0], torch.zeros_like(chain.states_RDSK[:, :, :, 0]))


@pytest.mark.parametrize(
    ("temperature", "coupling", "sharpness"), [(0, 1.25, 1.0), (0.5, None, 2.0), (0.5, 1.25, 1.6)]
)
@torch.inference_mode()
def test_edges_are_scaled_as_the_scores_that_they_correct(loaded, temperature, coupling, sharpness):
    """By the temperature, and by the scale of coupled drafts; at least 16 candidates are rescored."""
    target, drafter = loaded
    params = SamplingParams(temperature=temperature, seed=2)
    chooser = Chooser([params], VOCABULARY, target.ops, torch.device("cpu"), 8, coupling)
    logits_RDV = torch.randn(1, 7, VOCABULARY, dtype=torch.float64)
    state_RDh, anchors_R = torch.randn(1, 7, 24, dtype=torch.float64), torch.tensor([3])
    lengths, history = Lengths(torch.tensor([9]), (9,)), chooser.begin([[1]])

    def edges(tokens_RDK):
        return drafter.edges(anchors_R, tokens_RDK, state_RDh)

    base = chooser.candidates(Proposal(logits_RDV), history, lengths, EDGE_CANDIDATES)
    tokens_RDK, log_probs_RDK = base.tokens_RDSK[:, :, 0], base.log_probs_RDSK[:, :, 0]
    wanted = edge_candidates(tokens_RDK, log_probs_RDK, sharpness * edges(tokens_RDK))
    for count in (1, EDGE_CANDIDATES):
        found = chooser.candidates(Proposal(logits_RDV, edges), history, lengths, count)
        assert torch.equal(found.tokens_RDSK, wanted.tokens_RDSK)
        torch.testing.assert_close(found.log_probs_RDSK, wanted.log_probs_RDSK)


def test_rounds_offline_are_the_engines(loaded):
    """Up to the last block's length before the end, where the engine drafts no deeper than it may emit."""
    target, drafter = loaded
    params = SamplingParams(max_tokens=130, temperature=0)
    text = tokens_of(answered(engine_of(loaded, "off"), params))
    whole = [*PROMPT, *text[:120]]
    _, features_TF = plain_forward(target, whole, (2, 0))
    budgets = (None, *BUDGETS)
    found = measure_example(drafter, torch.tensor(whole), features_TF, len(PROMPT), budgets)
    for budget in budgets:
        engine = engine_of(loaded, "chain" if budget is None else "tree", budget)
        emitted = itertools.accumulate(len(piece.token_ids) for piece in answered(engine, params)[1:])
        assert found[budget] == Acceptance(119, sum(count < 119 for count in emitted) + 1), budget


# On disk


def test_a_checkpoint_keeps_its_edges(loaded, tmp_path):
    target, drafter = loaded
    write_drafter(tmp_path)
    drafter = dataclasses.replace(load_drafter(tmp_path, target), edges=drafter.edges)
    save_drafter(tmp_path / "d", drafter_config(), drafter.model, drafter.vocabulary, edges=drafter.edges.net)
    again = load_drafter(tmp_path / "d", target)
    for name, tensor in drafter.edges.net.state_dict().items():
        assert torch.equal(again.edges.net.state_dict()[name], tensor.bfloat16().double())
    (tmp_path / "d" / EDGES_FILE).unlink()
    assert load_drafter(tmp_path / "d", target).edges is None


@pytest.mark.parametrize("fault", ["truncated", "missing", "narrow", "extra", "NaN", "overflow", "folder"])
def test_a_file_of_edges_that_does_not_fit_is_refused(tmp_path, fault):
    net = EdgeNet(12 if fault == "narrow" else 24, 16, 8)
    save_edges(tmp_path, net)
    path = tmp_path / EDGES_FILE
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    if fault == "missing":
        save_file({"mix.weight": net.mix.weight.detach()}, path)
    if fault == "extra":
        save_file({**net.state_dict(), "bias": torch.zeros(3)}, path)
    if fault in ("NaN", "overflow"):
        child = net.child.weight.detach().double()
        child[3, 5] = torch.nan if fault == "NaN" else 1e300
        save_file({**net.state_dict(), "child.weight": child}, path)
    if fault == "folder":
        path.unlink()
        path.mkdir()
    with pytest.raises(CheckpointError, match=f"{EDGES_FILE}: not an edge net for hidden size 24.*remove it"):
        load_edges(tmp_path, 24, torch.float32, torch.device("cpu"))
    assert load_edges(tmp_path / "nowhere", 24, torch.float32, torch.device("cpu")) is None


# Training


def test_the_loss_is_what_rescoring_costs_the_labels(loaded):
    """Minus the gain in log-probability that `offer` gives the answer's token under its true parent."""
    _, drafter = loaded
    generator = torch.Generator().manual_seed(5)
    hidden_AbH = 0.2 * torch.randn(9, 5, 24, dtype=torch.float64, generator=generator)
    tokens_AD = torch.randint(VOCABULARY, (9, 4), generator=generator)
    counted_AD = torch.arange(4) < torch.where(torch.arange(9) % 2 == 0, 4, 2)[:, None]
    anchors_A = torch.randint(VOCABULARY, (9,), generator=generator)
    labels = Labels(tokens_AD, counted_AD)
    found = edge_loss(
        drafter.edges.net, drafter.vocabulary, hidden_AbH, anchors_A, labels, 2.0, loss_total(counted_AD, 2.0)
    )
    ranked = rank_tokens(drafter, hidden_AbH[:, 1:], CANDIDATES)
    assert ranked[1].exp().sum(-1).max() < 0.9, "tokens that are not rescored weigh in the loss as well"
    weights_AD = decay_weights(counted_AD, 2.0)
    wanted = 0.0
    with torch.inference_mode():
        edges_ADKK = drafter.edges(anchors_A, ranked[0], hidden_AbH[:, 1:])
        table = drafter.vocabulary.embedding
        for a in range(9):
            for d in range(4):
                parent = anchors_A[a] if d == 0 else tokens_AD[a, d - 1]
                children_K = ranked[0][a, d]
                edge_K = drafter.edges.net(
                    table[parent][None, None, None],
                    hidden_AbH[a, d + 1][None, None],
                    table[children_K][None, None],
                )[0, 0, 0]
                q_K = ranked[1][a, d].double().exp()
                norm = (q_K * edge_K.exp()).sum() + 1 - q_K.sum()
                hit_K = children_K == tokens_AD[a, d]
                gain = float((edge_K * hit_K).sum() - norm.log())
                wanted -= gain * float(weights_AD[a, d])
    assert edges_ADKK.shape == (9, 4, CANDIDATES, CANDIDATES)
    assert float(found.detach()) == pytest.approx(wanted / float(weights_AD.sum()), rel=1e-4)


def test_edges_learn_what_the_drafter_cannot_know(tmp_path):
    """Texts in which the next token follows from the one before: with edges the same run accepts more, the drafter
    itself is the same to the bit, and a resumed run goes on as if it had never stopped."""
    target = toy_target("qwen3")
    config = dataclasses.replace(CONFIG, steps=60, log_every=20, edge_rank=0, learning_rate=3e-3)
    with_edges = dataclasses.replace(config, edge_rank=8, edge_inner=16, edge_blocks=1000)
    examples = write_examples(tmp_path / "data")
    plain = Trainer(config, target, new_drafter(config, target), examples)
    trainer = Trainer(with_edges, target, new_drafter(config, target), examples)
    list(plain.steps())
    reports = list(trainer.steps())
    for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert reports[-1].edge_loss < reports[0].edge_loss < 0
    assert trainer.validate().tree.length > plain.validate().tree.length


def test_a_resumed_run_has_the_same_edges(tmp_path):
    target = toy_target("qwen3")
    config = dataclasses.replace(CONFIG, steps=8, log_every=1, edge_rank=8, edge_inner=16)
    examples = write_examples(tmp_path / "data")
    whole = Trainer(config, target, new_drafter(config, target), examples)
    losses = [report.edge_loss for report in whole.steps()]
    half = Trainer(config, target, new_drafter(config, target), examples)
    for report in half.steps():
        if report.step == 4:
            break
    half.save(tmp_path / "run")
    again = Trainer(config, target, new_drafter(config, target), examples)
    again.resume(read_state(latest(tmp_path / "run")))
    assert [report.edge_loss for report in again.steps()] == losses[4:]


def test_a_run_can_begin_with_the_edges_of_a_drafter(tmp_path):
    target = toy_target("qwen3")
    config = dataclasses.replace(CONFIG, edge_rank=8, edge_inner=16)
    net = new_edges(config, target)
    randomise(net, 3, 0.5)
    save_edges(tmp_path, net)
    fresh = new_edges(config, target)
    load_edge_weights(fresh, tmp_path)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, net.state_dict()[name].bfloat16().double())
    with pytest.raises(ConfigError, match="has edges of edge_rank 8 and edge_inner 16; set them so"):
        load_edge_weights(new_edges(dataclasses.replace(config, edge_rank=4), target), tmp_path)
    load_edge_weights(fresh, tmp_path / "without")
    assert torch.equal(fresh.mix.weight, net.mix.weight.bfloat16().double()), (
        "a drafter without edges changes none"
    )


class Loud(Group):
    """A group whose mean of anything is twice what this process brings."""

    def average(self, value):
        return 2 * value


def test_edges_learn_from_some_blocks_by_the_groups_total(tmp_path):
    """No more blocks than asked for, and their loss is divided by what the group says."""
    target = toy_target("qwen3")
    config = dataclasses.replace(CONFIG, edge_rank=8, edge_inner=16, edge_blocks=5)
    examples, losses, blocks = write_examples(tmp_path / "data"), [], []

    def watched(net, vocabulary, hidden_AbH, *arguments):
        blocks.append(hidden_AbH.shape[0])
        return edge_loss(net, vocabulary, hidden_AbH, *arguments)

    for group in (Group(), Loud()):
        trainer = Trainer(config, target, new_drafter(config, target), examples, group)
        randomise(trainer.edges, 1, 0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ddtree.training.trainer.edge_loss", watched)
            losses.append(float(trainer._backward(trainer._pack(0))[0][1]))
    assert blocks == [5, 5]
    assert losses[0] == pytest.approx(2 * losses[1])


def test_a_drafter_learns_nothing_from_its_edges(tmp_path):
    """Their gradient stops at the hidden states."""
    hidden_AbH = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    _, vocabulary = toy_drafter(toy_target("qwen3"))
    labels = Labels(torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.bool))
    net = toy_edges(vocabulary).net
    loss = edge_loss(net, vocabulary, hidden_AbH, torch.tensor([1, 2, 3]), labels, 2.0, torch.tensor(1.0))
    loss.backward()
    assert hidden_AbH.grad is None
    assert net.mix.weight.grad.abs().sum() > 0


def test_a_net_starts_by_adding_nothing():
    config = dataclasses.replace(CONFIG, edge_rank=8)
    target = toy_target("qwen3")
    net = new_edges(config, target)
    states = torch.randn(1, 2, 24, dtype=torch.float64)
    embedded = torch.randn(1, 2, 3, 24, dtype=torch.float64)
    assert torch.equal(net(embedded, states, embedded), torch.zeros(1, 2, 3, 3, dtype=torch.float64))
    randomise(net, 1, 0.5)
    assert net(embedded, states, embedded).abs().min() > 0
    assert new_edges(CONFIG, target) is None
