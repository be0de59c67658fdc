"""The loss of draft positions: torch's own cross-entropy, weighed, in chunks, with labels where they belong."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from ddtree.training import loss as module
from ddtree.training.capture import causal_attend
from ddtree.training.examples import Pack
from ddtree.training.loss import Labels, Objective, decay_weights, dpace_weights, draft_loss, loss_total
from ddtree.training.start import new_drafter
from ddtree.training.trainer import Trainer
from tests.toys import VOCABULARY, toy_target
from tests.unit.test_trainer import CONFIG, write_examples

HIDDEN, WORDS, DEPTH = 6, 11, 4
PLAIN = Objective(gamma=2.0)
OBJECTIVES = {
    "decay": PLAIN,
    "dpace": Objective(gamma=2.0, dpace_alpha=0.5),
    "soft": Objective(gamma=2.0, soft_share=1.0, soft_temperature=1.5),
    "all": Objective(gamma=2.0, dpace_alpha=0.3, soft_share=0.4),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


def blocks(count, seed=0):
    """Random hidden states [A, D + 1, H], head and labels; a third of the blocks end early."""
    generator = torch.Generator().manual_seed(seed)
    hidden_AbH = 2 * torch.randn(count, DEPTH + 1, HIDDEN, generator=generator, dtype=torch.float64)
    head_VH = torch.randn(WORDS, HIDDEN, generator=generator, dtype=torch.float64)
    tokens_AD = torch.randint(WORDS, (count, DEPTH), generator=generator)
    ends_A = torch.where(torch.arange(count) % 3 == 1, 1, DEPTH)
    teacher_ADh = torch.randn(count, DEPTH, HIDDEN, generator=generator, dtype=torch.float64)
    labels = Labels(tokens_AD, torch.arange(DEPTH) < ends_A[:, None], teacher_ADh)
    return hidden_AbH.requires_grad_(), head_VH, labels


def torchs(hidden_AbH, head_VH, labels, objective):
    """The same by torch: log-softmax, one product with the wanted distribution, and weights by hand."""
    log_q_ADV = (hidden_AbH[:, 1:] @ head_VH.T).log_softmax(-1)
    wanted_ADV = F.one_hot(labels.tokens_AD, WORDS).double()
    soft_ADV = (labels.teacher_ADh @ head_VH.T / objective.soft_temperature).softmax(-1)
    wanted_ADV = (1 - objective.soft_share) * wanted_ADV + objective.soft_share * soft_ADV
    each_AD = -(wanted_ADV * log_q_ADV).sum(-1)
    q_AD = log_q_ADV.detach().exp().gather(-1, labels.tokens_AD[..., None])[..., 0]
    weights, total = torch.zeros_like(each_AD), 0.0
    for a, counted_D in enumerate(labels.counted_AD.tolist()):
        decay = [math.exp(-d / objective.gamma) for d in range(sum(counted_D))]
        total += sum(decay)
        for d in range(len(decay)):
            alpha = objective.dpace_alpha
            reached = [
                math.prod((1 - alpha) * float(q) + alpha for q in q_AD[a, : m + 1]) for m in range(len(decay))
            ]
            weights[a, d] = sum(reached[d:]) if alpha else decay[d]
    return (each_AD * weights).sum() / total


def loss_of(hidden_AbH, head_VH, labels, objective):
    return draft_loss(hidden_AbH, head_VH, labels, objective, loss_total(labels.counted_AD, objective.gamma))


def number(value):
    return float(value.detach())


@every_objective
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("chunk_rows", [32768, 2 * DEPTH, 1])
def test_value_and_gradient_are_torchs(monkeypatch, objective, count, chunk_rows):
    """Whether the blocks come in one chunk, in several, or one by one; the loss itself is computed in float32."""
    monkeypatch.setattr(module, "CHUNK_ROWS", chunk_rows)
    hidden_AbH, head_VH, labels = blocks(count)
    found, correct_AD = loss_of(hidden_AbH, head_VH, labels, objective)
    wanted = torchs(hidden_AbH, head_VH, labels, objective)
    assert number(found) == pytest.approx(number(wanted), rel=1e-5)
    (mine,) = torch.autograd.grad(3 * found, hidden_AbH)
    (theirs,) = torch.autograd.grad(3 * wanted, hidden_AbH)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert torch.equal(correct_AD, (hidden_AbH[:, 1:] @ head_VH.T).argmax(-1) == labels.tokens_AD)
    assert not correct_AD.requires_grad


def test_a_chunk_holds_no_more_logits_than_fit(monkeypatch):
    rows, whole = [], module._chunk

    def watched(logits_CV, *arguments):
        rows.append(logits_CV.shape[0])
        return whole(logits_CV, *arguments)

    monkeypatch.setattr(module, "CHUNK_ROWS", 4 * DEPTH)
    monkeypatch.setattr(module, "_chunk", watched)
    loss_of(*blocks(7), PLAIN)
    assert rows == [4 * DEPTH, 3 * DEPTH]


@every_objective
def test_positions_past_the_end_change_nothing(objective):
    """Neither their labels nor their hidden states do, and no gradient reaches them."""
    hidden_AbH, head_VH, labels = blocks(9)
    idle_AD = ~labels.counted_AD
    assert 0 < int(idle_AD.sum()) < idle_AD.numel()
    found, _ = loss_of(hidden_AbH, head_VH, labels, objective)
    (gradient_AbH,) = torch.autograd.grad(found, hidden_AbH)
    assert not gradient_AbH[:, 1:][idle_AD].any()
    assert gradient_AbH[:, 1:][~idle_AD].abs().sum(-1).all()
    other_AbH = hidden_AbH.detach().clone()
    other_AbH[:, 1:][idle_AD] *= -9
    other = dataclasses.replace(labels, tokens_AD=torch.where(idle_AD, 0, labels.tokens_AD))
    assert torch.equal(loss_of(other_AbH, head_VH, other, objective)[0], found)


@every_objective
@pytest.mark.parametrize("chunk_rows", [32768, 1])
def test_nothing_that_counts_is_a_loss_of_nothing(monkeypatch, objective, chunk_rows):
    monkeypatch.setattr(module, "CHUNK_ROWS", chunk_rows)
    hidden_AbH, head_VH, labels = blocks(8)
    labels = dataclasses.replace(labels, counted_AD=torch.zeros_like(labels.counted_AD))
    found, _ = loss_of(hidden_AbH, head_VH, labels, objective)
    (gradient_AbH,) = torch.autograd.grad(found, hidden_AbH)
    assert number(found) == 0.0
    assert torch.equal(gradient_AbH, torch.zeros_like(gradient_AbH))


def test_large_logits_do_not_overflow():
    hidden_AbH, head_VH, labels = blocks(8)
    big_AbH = (hidden_AbH.detach() * 1e4).requires_grad_()
    found, _ = loss_of(big_AbH, head_VH, labels, PLAIN)
    assert number(found) == pytest.approx(number(torchs(big_AbH, head_VH, labels, PLAIN)), rel=1e-5)
    assert torch.autograd.grad(found, big_AbH)[0].isfinite().all()


def test_bfloat16_states_are_judged_in_float32():
    hidden_AbH, head_VH, labels = blocks(12)
    hidden_AbH, head_VH = hidden_AbH.detach().bfloat16().requires_grad_(), head_VH.bfloat16()
    found, _ = loss_of(hidden_AbH, head_VH, labels, PLAIN)
    assert found.dtype == torch.float32
    wanted = torchs(hidden_AbH.detach().double(), head_VH.double(), labels, PLAIN)
    assert number(found) == pytest.approx(number(wanted), rel=5e-3)
    assert torch.autograd.grad(found, hidden_AbH)[0].dtype == torch.bfloat16


def test_weights_decay_from_the_first_mask_on():
    for depth, gamma in [(1, 7.0), (15, 7.0), (15, 1e-3), (7, 1e6)]:
        weights_AD = decay_weights(torch.ones(1, depth, dtype=torch.bool), gamma)
        assert weights_AD.dtype == torch.float32
        assert weights_AD[0].tolist() == pytest.approx([math.exp(-k / gamma) for k in range(depth)])


def test_a_sure_drafter_weighs_positions_by_what_follows_them():
    """All labels certain: position k has D - k + 1 depths that hang on it. None likely: alpha alone is left."""
    counted_AD = torch.tensor([[True] * 4, [True, True, False, False]])
    sure = dpace_weights(torch.ones(2, 4), counted_AD, 0.5)
    assert sure.tolist() == [[4.0, 3.0, 2.0, 1.0], [2.0, 1.0, 0.0, 0.0]]
    lost = dpace_weights(torch.zeros(2, 4), counted_AD, 0.5)
    assert lost[0].tolist() == pytest.approx([0.9375, 0.4375, 0.1875, 0.0625])


# Labels: position k of a block predicts the token k places after its anchor


def test_the_anchors_row_predicts_nothing():
    """Row k of a block stands against label k - 1, and row 0 against none."""
    hidden_AbH, head_VH, _ = blocks(5, seed=1)
    tokens_AD = (hidden_AbH[:, 1:] @ head_VH.T).argmax(-1)
    tokens_AD[2, 1] = (tokens_AD[2, 1] + 1) % WORDS
    found, correct_AD = loss_of(hidden_AbH, head_VH, Labels(tokens_AD, tokens_AD >= 0), PLAIN)
    assert correct_AD.tolist() == [[(a, d) != (2, 1) for d in range(DEPTH)] for a in range(5)]
    (gradient_AbH,) = torch.autograd.grad(found, hidden_AbH)
    assert not gradient_AbH[:, 0].any()
    assert gradient_AbH[:, 1:].abs().sum(-1).all()


@pytest.fixture
def trainer(tmp_path):
    """A trainer on examples of 18 tokens, 6 of them prompt; they are kept as `examples`."""
    config, target = dataclasses.replace(CONFIG, block_size=6), toy_target("qwen3")
    examples = write_examples(tmp_path / "data")
    made = Trainer(config, target, new_drafter(config, target), examples)
    made.examples = examples
    return made


def test_labels_follow_their_anchor_inside_its_example(trainer):
    """Of a whole pack, place by place: label k is the token k after the anchor, and weighs nothing past its
    example's end, in padding, or behind an anchor that only fills up."""
    seen = cut = 0
    for step in range(8):
        trainer.step = step
        pack = trainer._pack(0)
        captured = trainer._features.of_pack(pack)
        labels = trainer._labels(pack, captured)
        tokens_T = trainer._tokens_T[pack.source_T]
        for a, anchor in enumerate(pack.anchors_A.tolist()):
            for d in range(5):
                place = anchor + d + 1
                inside = place < len(tokens_T) and bool(pack.example_T[place] == pack.example_T[anchor])
                assert bool(labels.counted_AD[a, d]) == (inside and bool(pack.real_A[a]))
                if labels.counted_AD[a, d]:
                    assert int(labels.tokens_AD[a, d]) == int(tokens_T[place])
                    assert int(pack.positions_T[place]) == int(pack.positions_T[anchor]) + d + 1
                    seen += 1
                else:
                    cut += 1
    assert seen > 300
    assert cut > 100


def test_soft_labels_are_the_targets_view_of_the_same_position(trainer):
    """The target's distribution after the token before a position is what that position should match."""
    soft = dataclasses.replace(trainer.config, soft_share=1.0)
    trainer = Trainer(soft, trainer._target, (trainer.drafter_config, trainer.model), trainer.examples)
    pack = trainer._pack(0)
    labels = trainer._labels(pack, trainer._features.of_pack(pack))
    tokens_T, checked = trainer._tokens_T[pack.source_T], 0
    for member in range(len(pack.examples)):
        mine_T = pack.example_T == member
        hidden_1Th, _ = trainer._target.run(tokens_T[mine_T][None], pack.positions_T[mine_T][None], causal_attend)
        for a in (pack.example_T[pack.anchors_A] == member).nonzero()[:, 0].tolist():
            for d in labels.counted_AD[a].nonzero()[:, 0].tolist():
                position = int(pack.positions_T[pack.anchors_A[a]]) + d
                torch.testing.assert_close(labels.teacher_ADh[a, d], hidden_1Th[0, position], rtol=0, atol=1e-10)
                checked += 1
    assert checked > 50


def test_a_step_drafts_what_it_is_measured_on(trainer):
    """One step's loss is the cross-entropy of the served block against the answer's next tokens."""
    pack = trainer._pack(0)
    captured = trainer._features.of_pack(pack)
    hidden_AbH = trainer._hidden(pack, captured.features_TF)
    labels = trainer._labels(pack, captured)
    logits_ADV = trainer._vocabulary.logits(hidden_AbH[:, 1:])
    log_q_AD = logits_ADV.log_softmax(-1).gather(-1, labels.tokens_AD[..., None])[..., 0]
    weights_AD = decay_weights(labels.counted_AD, CONFIG.decay_gamma)
    report = trainer._train_step(logged=True)
    assert report.loss == pytest.approx(number(-(log_q_AD * weights_AD).sum() / weights_AD.sum()), rel=1e-5)
    right_AD = (logits_ADV.argmax(-1) == labels.tokens_AD) & labels.counted_AD
    assert report.accuracy == pytest.approx((right_AD.sum(0) / labels.counted_AD.sum(0)).tolist())
    assert logits_ADV.shape[-1] == VOCABULARY
    assert report.blocks == int(pack.real_A.sum())


def test_gradients_add_up_over_the_packs_of_a_step(trainer, tmp_path):
    """Two packs a step give the mean of their gradients, and the next step goes on behind them."""
    half = dataclasses.replace(trainer.config, accumulation=2)
    twice = Trainer(half, trainer._target, new_drafter(half, trainer._target), trainer.examples)
    gradients = []
    for step in range(2):
        trainer.step = step
        trainer.model.zero_grad()
        trainer._backward(trainer._pack(0))
        gradients.append(trainer.model.fc.weight.grad.clone())
    for part in range(2):
        twice._backward(twice._pack(part))
    torch.testing.assert_close(
        twice.model.fc.weight.grad, (gradients[0] + gradients[1]) / 2, rtol=1e-9, atol=1e-12
    )
    twice.step = 1
    assert torch.equal(twice._pack(0).source_T, pack_of(trainer, 2).source_T)


def pack_of(trainer, step):
    trainer.step = step
    return trainer._pack(0)


def test_a_pack_with_nothing_to_learn_changes_no_weight_to_nan(trainer, monkeypatch):
    """Every anchor a filler: a loss of nothing, a gradient of nothing, and finite weights after the step."""
    pack = trainer._pack(0)
    empty = Pack(
        pack.examples, pack.source_T, pack.positions_T, pack.example_T, 0 * pack.anchors_A, 0 * pack.real_A > 0
    )
    monkeypatch.setattr(trainer, "_pack", lambda part: empty)
    report = trainer._train_step(logged=True)
    assert (report.loss, report.gradient_norm, report.blocks) == (0.0, 0.0, 0)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
