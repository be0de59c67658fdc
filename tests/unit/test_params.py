"""Sampling parameters: what is accepted, what is refused and how, and that nothing can change later."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.errors import RequestError
from ddtree.speculation import params as params_module
from ddtree.speculation.params import Constraint, SamplingParams

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class AnyToken:
    """A constraint that allows everything."""

    def start(self):
        return 0

    def allowed(self, state):
        return None

    def advance(self, state, token):
        return state + 1


def test_defaults_are_plain_greedy():
    params = SamplingParams()
    assert params.greedy
    assert params.plain_greedy
    assert not params.needs_history
    assert params.seed is None
    assert params.max_tokens == 256
    assert params.logit_bias == {}


@pytest.mark.parametrize(
    ("change", "greedy", "history", "plain"),
    [
        ({"temperature": 0.7}, False, False, False),
        ({"temperature": 0}, True, False, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True, False, True),
        ({"repetition_penalty": 1.1}, True, True, False),
        ({"presence_penalty": -0.5}, True, True, False),
        ({"frequency_penalty": 0.5}, True, True, False),
        ({"logit_bias": {3: 1.0}}, True, False, False),
        ({"constraint": AnyToken()}, True, False, False),
    ],
)
def test_what_a_request_needs(change, greedy, history, plain):
    params = SamplingParams(**change)
    assert (params.greedy, params.needs_history, params.plain_greedy) == (greedy, history, plain)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", None, 1j, 10**400, [1.0]])
def test_numbers_refuse_what_is_none(name, value):
    with pytest.raises(RequestError, match=f"{name} must be a number from .* to .*: got .*; use "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", (-0.1, 1e5), (0, 1e-4, 0.7, 2, 1e4)),
        ("top_p", (-0.01, 1.01), (0, 0.5, 1)),
        ("min_p", (-0.01, 1.01), (0, 0.5, 1)),
        ("repetition_penalty", (0, -1, 1e5), (0.5, 1, 1.3)),
        ("presence_penalty", (-1e5, 1e5), (-2, 0, 2.0)),
        ("frequency_penalty", (-1e5, 1e5), (-2, 0, 2.0)),
        ("top_k", (-1, 1.0, 2**63), (0, 1, 10**6)),
        ("max_tokens", (0, -1, 2.0, None, True), (1, 10**6)),
    ],
)
def test_ranges(name, bad, good):
    for value in bad:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})
    for value in good:
        kept = getattr(SamplingParams(**{name: value}), name)
        assert kept == value
        assert isinstance(kept, int if name in ("top_k", "max_tokens") else float)


def test_a_temperature_that_overflows_says_why():
    with pytest.raises(RequestError, match="too small: logits divided by it overflow; use 0 for greedy"):
        SamplingParams(temperature=1e-9)


@given(st.integers(-(2**63), 2**64 - 1))
def test_seeds_are_kept_as_unsigned_64_bits(seed):
    kept = SamplingParams(seed=seed).seed
    assert 0 <= kept < 2**64
    assert kept % 2**64 == seed % 2**64


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 1.0, True, "7"])
def test_bad_seeds(seed):
    with pytest.raises(RequestError, match="seed must be an integer from"):
        SamplingParams(seed=seed)


def test_stop_strings():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=()).stop == ()
    for bad in ("", ["a", ""]):
        with pytest.raises(RequestError, match="empty string"):
            SamplingParams(stop=bad)
    for bad in (7, None, ["a", 7], {"a"}, b"a"):
        with pytest.raises(RequestError, match="stop must be a string or a list of strings"):
            SamplingParams(stop=bad)


def test_stop_token_ids():
    assert SamplingParams(stop_token_ids=[0, 5]).stop_token_ids == (0, 5)
    for bad in ([-1], [1.0], [True], ["1"], [2**63]):
        with pytest.raises(RequestError, match="a token id in stop_token_ids must be an integer"):
            SamplingParams(stop_token_ids=bad)
    for bad in (5, None, "5"):
        with pytest.raises(RequestError, match="stop_token_ids must be a list"):
            SamplingParams(stop_token_ids=bad)


def test_logit_bias():
    assert SamplingParams(logit_bias={3: -100, 4: 0.5}).logit_bias == {3: -100.0, 4: 0.5}
    for bad in ({-1: 1.0}, {"3": 1.0}, {True: 1.0}, {1.5: 1.0}):
        with pytest.raises(RequestError, match="a token id in logit_bias must be an integer"):
            SamplingParams(logit_bias=bad)
    for bad in ({3: math.nan}, {3: -math.inf}, {3: True}, {3: "1"}, {3: 1e5}):
        with pytest.raises(RequestError, match=r"logit_bias\[3\] must be a number"):
            SamplingParams(logit_bias=bad)
    for bad in (None, [(3, 1.0)], 3):
        with pytest.raises(RequestError, match="logit_bias must map"):
            SamplingParams(logit_bias=bad)


def test_flags_and_constraints():
    assert SamplingParams(ignore_eos=True).ignore_eos
    with pytest.raises(RequestError, match="ignore_eos must be true or false: got 1"):
        SamplingParams(ignore_eos=1)
    assert isinstance(AnyToken(), Constraint)
    with pytest.raises(RequestError, match=r"constraint must have the methods start, allowed and advance"):
        SamplingParams(constraint="json")


def test_nothing_changes_later():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias, stop=["a"])
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    with pytest.raises(AttributeError):
        object.__setattr__(params, "extra", 1)


def test_equal_requests_are_equal_and_can_be_changed_into_others():
    one = SamplingParams(temperature=1, logit_bias={3: 1}, stop="a")
    two = SamplingParams(temperature=1.0, logit_bias={3: 1.0}, stop=("a",))
    assert one == two
    assert hash(one) == hash(two)
    warmer = dataclasses.replace(one, temperature=2.0, seed=-1)
    assert (warmer.temperature, warmer.logit_bias, warmer.seed) == (2.0, {3: 1.0}, 2**64 - 1)


@pytest.mark.parametrize("settings", [{}, {"logit_bias": {3: -1.5, 0: 2}, "stop": "a", "temperature": 0.5}])
def test_other_processes_can_be_sent_a_request(settings):
    params = SamplingParams(**settings)
    for other in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert other == params
        with pytest.raises(TypeError):
            other.logit_bias[5] = 1.0
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert repr(params) == repr(pickle.loads(pickle.dumps(params)))


def test_vocabulary():
    params = SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(0, 4))
    params.check_vocabulary(10)
    with pytest.raises(RequestError, match="logit_bias names token 9, but this model's vocabulary ends at 8"):
        params.check_vocabulary(9)
    with pytest.raises(RequestError, match="stop_token_ids names token 7"):
        SamplingParams(stop_token_ids=(0, 7)).check_vocabulary(7)


def test_the_module_itself_imports_no_torch():
    code = f"import runpy, sys; runpy.run_path({params_module.__file__!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
