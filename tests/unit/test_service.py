"""The service: many threads, one engine; queues that are bounded, requests that vanish, callbacks that fail."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from ddtree.engine.service import Service, Submission
from ddtree.errors import BusyError, ClosedError, EngineError, RequestError
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import fixed_plan
from ddtree.speculation.protocols import Proposal
from tests.drafters import pieces, tokens_of
from tests.soak import PLAIN, make_cases, models, new_engine
from tests.toys import VOCABULARY, random_tokens

PATIENCE_S = 60


@cache
def cases():
    return make_cases(models()[0], 16, seed=9)


def new_service(max_queue=64, **config):
    target, drafter = models()
    return Service(new_engine(target, drafter, **({"max_sequences": 4} | config)), max_queue=max_queue)


@pytest.fixture
def opened():
    """Services that are closed at the end of the test, whatever happened in it."""
    services = []

    def open_one(*arguments, **config):
        services.append(new_service(*arguments, **config))
        return services[-1]

    yield open_one
    for service in services:
        service.close()
        assert not service._thread.is_alive()


@dataclass
class Client:
    """Gathers what a submission brings."""

    pieces: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def on_end(self, result):
        self.ends.append(result)
        self.ended.set()

    def send(self, service, prompt, params, **caps):
        return service.submit(Submission(tuple(prompt), params, **caps), self.pieces.append, self.on_end)

    def wait(self):
        assert self.ended.wait(PATIENCE_S)
        (end,) = self.ends
        return end


LONG = SamplingParams(max_tokens=140, ignore_eos=True)


class Gate:
    """Holds the engine's thread inside a piece's callback until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, piece):
        self.reached.set()
        assert self.open.wait(PATIENCE_S)


def test_threads_get_the_answers_of_plain_decoding(opened):
    service = opened()
    clients = [Client() for _ in cases()]

    def send(i):
        case = cases()[i]
        mode, budget = [(None, None), ("off", None), ("chain", 5), ("tree", 3), ("shadow", 8)][i % 5]
        clients[i].send(service, case.prompt, case.params, mode=mode, budget=budget, records=True, logprobs=1)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (client, case) in enumerate(zip(clients, cases(), strict=True)):
        done = client.wait()
        assert list(done.token_ids) == tokens_of(client.pieces) == case.answer
        assert done.text == "".join(piece.text for piece in client.pieces)
        assert done.prompt_tokens == len(case.prompt)
        modes = {piece.record.mode for piece in client.pieces[1:]}
        assert modes <= {"off", ["tree", "off", "chain", "tree", "shadow"][i % 5]}
        assert all(len(piece.logprobs) == len(piece.token_ids) for piece in client.pieces)
        assert max([0, *(len(piece.record.tokens) for piece in client.pieces[1:])]) <= 8 + 8 + 7 + 1
    assert service.drain(PATIENCE_S)
    numbers = service.snapshot()
    assert (numbers.running, numbers.waiting, numbers.pages_used, numbers.since_round_s) == (0, 0, 0, None)
    assert sum(numbers.finished.values()) == len(clients)
    assert numbers.prompt_tokens == sum(len(case.prompt) for case in cases())
    emitted = sum(counts.emitted for counts in numbers.modes.values())
    assert emitted == sum(len(case.answer) - 1 for case in cases())
    for counts in numbers.modes.values():
        assert counts.emitted == counts.rounds + counts.accepted
        assert sum(counts.accepted_by_depth) == counts.accepted <= counts.drafted
        assert list(counts.accepted_by_depth) == sorted(counts.accepted_by_depth, reverse=True)
    assert all(
        numbers.phase_seconds[phase] > 0 for phase in ("prefill", "draft", "select", "verify", "walk", "commit")
    )


def test_a_full_queue_refuses_at_once(opened):
    service, gate = opened(max_queue=2, max_sequences=1), Gate()
    first = Client()
    service.submit(Submission((1, 2), LONG), gate, first.on_end)
    assert gate.reached.wait(PATIENCE_S)
    waiting = [Client(), Client()]
    for client in waiting:
        client.send(service, [3], SamplingParams(max_tokens=2, ignore_eos=True))
    began_s = time.perf_counter()
    with pytest.raises(BusyError, match="3 requests are running or waiting, and no more may wait") as refusal:
        Client().send(service, [3], SamplingParams())
    assert time.perf_counter() - began_s < 1
    assert refusal.value.retry_after_s >= 1
    assert service.snapshot().waiting >= 2
    gate.open.set()
    for client in (first, *waiting):
        client.wait()
    Client().send(service, [3], SamplingParams(max_tokens=1))


def test_nothing_may_wait_and_a_free_seat_still_takes(opened):
    service = opened(max_queue=0, max_sequences=1)
    client = Client()
    client.send(service, [3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(client.wait().token_ids) == 2


@pytest.mark.parametrize("queued", [True, False])
def test_a_cancelled_request_is_gone_within_a_round(opened, queued):
    service, gate = opened(max_sequences=1), Gate()
    first, second = Client(), Client()
    ticket = service.submit(Submission((1, 2), LONG), gate, first.on_end)
    assert gate.reached.wait(PATIENCE_S)
    other = second.send(service, [5, 6], SamplingParams(max_tokens=3, ignore_eos=True))
    service.cancel(other if queued else ticket)
    gate.open.set()
    (second if queued else first).wait()
    cancelled, kept = (second, first) if queued else (first, second)
    assert cancelled.wait().finish_reason == "cancelled"
    assert len(cancelled.wait().token_ids) == (0 if queued else 1)
    assert kept.wait().finish_reason == "length"
    service.cancel(ticket)  # has ended: nothing happens
    assert service.drain(PATIENCE_S)
    assert service.snapshot().pages_used == 0
    assert service.snapshot().finished["cancelled"] == 1


def test_what_cannot_be_honoured_is_refused_where_it_is_asked(opened):
    service = opened()
    for submission, message in [
        (Submission((), SamplingParams()), "the prompt is empty"),
        (Submission((VOCABULARY,), SamplingParams()), "outside the vocabulary"),
        (Submission(tuple(random_tokens(200, 1)), SamplingParams()), "the context holds 160"),
        (Submission((1,), SamplingParams(stop_token_ids=[VOCABULARY])), "stop_token_ids names token"),
        (Submission((1,), SamplingParams(), mode="best"), "mode must be one of"),
        (Submission((1,), SamplingParams(), budget=0), "budget must lie between"),
        (Submission((1,), SamplingParams(), logprobs=-1), "logprobs must lie between"),
    ]:
        with pytest.raises(RequestError, match=message):
            service.submit(submission, lambda piece: None, lambda end: None)
    assert service.drain(0)


def test_draining_finishes_what_was_accepted(opened):
    service, gate = opened(max_sequences=1), Gate()
    first, second = Client(), Client()
    service.submit(Submission((1, 2), SamplingParams(max_tokens=9, ignore_eos=True)), gate, first.on_end)
    second.send(service, [4], SamplingParams(max_tokens=5, ignore_eos=True))
    assert gate.reached.wait(PATIENCE_S)
    assert not service.drain(0.05)
    with pytest.raises(ClosedError, match="no new requests are taken"):
        Client().send(service, [1], SamplingParams())
    gate.open.set()
    assert service.drain(PATIENCE_S)
    assert (len(first.wait().token_ids), len(second.wait().token_ids)) == (9, 5)


def test_closing_ends_everything(opened):
    service = opened(max_sequences=1)
    clients = [Client() for _ in range(3)]
    for client in clients:
        client.send(service, [1, 2, 3], LONG)
    service.close()
    for client in clients:
        assert client.wait().finish_reason in ("cancelled", "length")
    with pytest.raises(ClosedError, match="the engine is closed"):
        clients[0].send(service, [1], SamplingParams())
    service.close()
    # The engine answers directly again.
    engine = service._engine
    assert len(tokens_of(pieces(engine, [1, 2], SamplingParams(max_tokens=4, ignore_eos=True), PLAIN))) == 4


def test_an_engine_that_serves_is_asked_through_its_service(opened):
    engine = opened()._engine
    with pytest.raises(ClosedError, match="submit requests there"):
        next(engine.run(engine.fixed_job([1], SamplingParams())))


@pytest.mark.parametrize("where", ["piece", "end"])
def test_a_callback_that_fails_ends_its_own_request_alone(opened, where, caplog):
    def fail(result):
        raise OSError("the client is gone")

    service, good, bad = opened(), Client(), Client()
    good.send(service, cases()[0].prompt, cases()[0].params)
    if where == "piece":
        service.submit(Submission((1, 2), LONG), fail, bad.on_end)
        assert bad.wait().finish_reason == "cancelled"
    else:
        service.submit(Submission((1, 2), SamplingParams(max_tokens=4, ignore_eos=True)), bad.pieces.append, fail)
    assert list(good.wait().token_ids) == cases()[0].answer
    assert service.drain(PATIENCE_S)
    assert service.snapshot().pages_used == 0
    assert any("callback of request" in record.message for record in caplog.records)


def test_a_step_that_fails_ends_its_requests_and_not_the_service(opened, monkeypatch, caplog):
    service = opened(max_sequences=2)
    engine = service._engine
    run, calls = engine.runner.round, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no more")
        return run(*arguments)

    monkeypatch.setattr(engine.runner, "round", failing)
    clients = [Client() for _ in range(3)]
    for client in clients:
        client.send(service, [1, 2, 3], LONG)
    for client in clients:
        end = client.wait()
        assert isinstance(end, EngineError)
        assert "MemoryError: no more" in str(end)
    case, after = cases()[1], Client()
    after.send(service, case.prompt, case.params)
    assert list(after.wait().token_ids) == case.answer
    assert service.drain(PATIENCE_S)
    engine.scheduler.check()
    assert service.snapshot().finished["error"] == 3


def test_a_request_that_cannot_be_begun_ends_alone(opened, monkeypatch, caplog):
    service = opened()
    add, calls = service._engine.add, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no more")
        return add(*arguments)

    monkeypatch.setattr(service._engine, "add", failing)
    first, second = Client(), Client()
    first.send(service, [1, 2], LONG)
    assert isinstance(first.wait(), EngineError)
    second.send(service, cases()[2].prompt, cases()[2].params)
    assert list(second.wait().token_ids) == cases()[2].answer


def test_a_stuck_round_shows(opened):
    service, gate = opened(), Gate()
    assert service.snapshot().since_round_s is None
    service.submit(Submission((1, 2), LONG), gate, lambda end: None)
    assert gate.reached.wait(PATIENCE_S)
    ages = [service.snapshot().since_round_s]
    time.sleep(0.05)
    ages.append(service.snapshot().since_round_s)
    assert ages[1] - ages[0] >= 0.04
    gate.open.set()


def test_drafts_that_are_never_accepted_raise_an_alarm():
    """The drafter always proposes a token that the request bans; the alarm ends with the first accepted draft."""
    target, drafter = models()
    engine = new_engine(target, drafter)
    decode = engine.runner.drafters.decode
    propose = decode.propose

    def hopeless(anchors_R, lengths, block_size):
        logits_RDV = propose(anchors_R, lengths, block_size).logits_RDV
        logits_RDV[..., 1:] = -torch.inf
        return Proposal(logits_RDV)

    decode.propose = hopeless
    banned = SamplingParams(max_tokens=80, ignore_eos=True, logit_bias={0: -1e4})
    plan = fixed_plan("chain", 2, 1)
    alarms = []
    for _ in range(2):
        list(engine.run(engine.fixed_job([1, 2], banned, plan)))
        numbers = engine.snapshot()
        alarms.append((numbers.zero_acceptance_rounds, numbers.zero_acceptance))
    # Of 79 tokens after the first, the last is said without a draft.
    assert alarms == [(78, False), (156, True)]
    wanted = SamplingParams(max_tokens=10, ignore_eos=True, logit_bias={0: 1e4})
    list(engine.run(engine.fixed_job([1, 2], wanted, plan)))
    assert not engine.snapshot().zero_acceptance
