"""Which drafter to ship: the arithmetic by hand, files that do not belong together, and a run on tiny models."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ddtree.errors import ConfigError, DataError
from tests.checkpoints import target_config, target_tensors, write_drafter, write_folder
from tests.toys import VOCABULARY, toy_target

TURNS = 9


@pytest.fixture(scope="module")
def choosing(benchmark_module):
    return benchmark_module("choosing")


def cost(device, plain_ms, **drafters):
    """drafters: name -> milliseconds of a round by arm, the same in every turn, or a list of them by turn."""

    def turns(ms):
        return ms if isinstance(ms, list) else [ms] * TURNS

    return {
        "verb": "cost",
        "model": "m",
        "device": device,
        "hardware": f"a {device}",
        "dtype": "float32",
        "threads": None,
        "prompt_hash": "timed",
        "plain": {"samples_ms": turns(plain_ms)},
        "drafters": {
            name: {
                "layers": 5,
                "parameters": 19_400_000,
                "block_size": 16,
                "edges": True,
                "weights": f"weights of {name}",
                "arms": {arm.replace("_", "-"): {"samples_ms": turns(ms)} for arm, ms in by_arm.items()},
            }
            for name, by_arm in drafters.items()
        },
        "provenance": {},
    }


def accepted(tasks, prompts=40, **changes):
    """tasks: name -> tokens of a round by arm, the same for every prompt, or a list of them by prompt."""

    def pairs(tokens):
        every = tokens if isinstance(tokens, list) else [tokens] * prompts
        return [[round(10 * one), 10] for one in every]

    found = {
        task: {"prompts": prompts, "prompt_hash": f"hash of {task}"}
        | {arm.replace("_", "-"): {"per_prompt": pairs(tokens)} for arm, tokens in arms.items()}
        for task, arms in tasks.items()
    }
    common = {"model": "m", "drafter": "step", "method": "offline", "temperature": 0.0, "seed": None}
    common |= {"max_tokens": 256, "block_size": 16, "dtype": "bfloat16", "device": "cuda:0"}
    return common | changes | {"tasks": found}


DEEP = {"maths": {"chain": 4, "tree_16": 6}, "chat": {"chain": 3, "tree_16": 3.2}}
THIN = {"maths": {"chain": 3, "tree_16": 4}, "chat": {"chain": 2.5, "tree_16": 3}}
COSTS = (
    # A thin drafter costs less a round: on the CPU little, on the GPU, where launches count, much.
    cost("cpu", 20.0, deep={"chain": 40.0, "tree_16": 50.0}, thin={"chain": 32.0, "tree_16": 40.0}),
    cost("cuda", 4.0, deep={"chain": 8.0, "tree_16": 8.0}, thin={"chain": 5.0, "tree_16": 5.0}),
)


def bare(figure):
    """A figure without spread: its interval is its value."""
    assert figure["low"] == pytest.approx(figure["value"])
    assert figure["high"] == pytest.approx(figure["value"])
    return figure["value"]


def test_expected_speeds_by_hand(choosing):
    report = choosing.choose(COSTS, {"deep": accepted(DEEP), "thin": accepted(THIN)})
    assert bare(report["devices"]["cpu"]["plain_tokens_per_second"]) == pytest.approx(50)
    deep = report["drafters"]["deep"]["devices"]
    maths = deep["cpu"]["tasks"]["maths"]
    assert {arm: bare(f["tokens_per_second"]) for arm, f in maths["arms"].items()} == pytest.approx(
        {"plain": 1 / 0.020, "chain": 4 / 0.040, "tree-16": 6 / 0.050}
    )
    assert {arm: bare(f["speed_up"]) for arm, f in maths["arms"].items()} == pytest.approx(
        {"plain": 1, "chain": 2, "tree-16": 2.4}
    )
    # On the CPU the chain is best on chat: 3 / 40 ms = 75 against 3.2 / 50 ms = 64; the tree on the GPU.
    assert [deep[device]["tasks"]["chat"]["best"] for device in ("cpu", "cuda")] == ["chain", "tree-16"]
    assert bare(deep["cpu"]["mean"]["tokens_per_second"]) == pytest.approx((120 + 75) / 2)
    assert bare(deep["cpu"]["mean"]["speed_up"]) == pytest.approx((2.4 + 1.5) / 2)
    assert bare(deep["cuda"]["mean"]["speed_up"]) == pytest.approx((6 / 2 + 3.2 / 2) / 2)
    thin = report["drafters"]["thin"]["devices"]
    assert bare(thin["cpu"]["mean"]["speed_up"]) == pytest.approx((4 / 2 + 2.5 / 1.6) / 2)
    assert bare(thin["cuda"]["mean"]["speed_up"]) == pytest.approx((4 / 1.25 + 3 / 1.25) / 2)


def test_the_verdict_is_the_geometric_mean_over_devices(choosing):
    """On the CPU the deep one is ahead, and it accepts more everywhere; over both devices the thin one wins."""
    report = choosing.choose(COSTS, {"deep": accepted(DEEP), "thin": accepted(THIN)})
    deep, thin = (1.95 * 2.3) ** 0.5, (1.78125 * 2.8) ** 0.5
    assert bare(report["drafters"]["deep"]["score"]) == pytest.approx(deep)
    assert bare(report["drafters"]["thin"]["score"]) == pytest.approx(thin)
    alone = choosing.choose(COSTS[:1], {"deep": accepted(DEEP), "thin": accepted(THIN)})
    assert alone["verdict"]["ranking"] == ["deep", "thin"]
    verdict = report["verdict"]
    assert (verdict["drafter"], verdict["ranking"]) == ("thin", ["thin", "deep"])
    assert bare(verdict["ahead_of"]["deep"]) == pytest.approx(thin / deep)
    assert verdict["words"].startswith("thin: 2.23 [2.23, 2.23] times plain decode")
    assert "ahead of deep by 5.5 %" in verdict["words"]


def test_plain_decode_is_a_mode_too(choosing):
    """A drafter that loses is switched off: its speed-up is 1, not less."""
    costs = [cost("cpu", 20.0, slow={"chain": 100.0})]
    report = choosing.choose(costs, {"slow": accepted({"maths": {"chain": 2}})})
    assert report["drafters"]["slow"]["devices"]["cpu"]["tasks"]["maths"]["best"] == "plain"
    assert bare(report["drafters"]["slow"]["score"]) == pytest.approx(1)


SPREAD = [2, 3, 4, 5, 6, 7, 8, 9] * 5


def test_acceptance_intervals_carry_through(choosing):
    """Costs without spread: the speed-up's interval is the acceptance's, scaled."""
    costs = [cost("cpu", 20.0, one={"chain": 40.0})]
    task = choosing.choose(costs, {"one": accepted({"maths": {"chain": SPREAD}})})
    chain = task["drafters"]["one"]["devices"]["cpu"]["tasks"]["maths"]["arms"]["chain"]
    brought, speed_up = chain["tokens_per_round"], chain["speed_up"]
    assert brought["value"] == pytest.approx(5.5)
    assert 4.6 < brought["low"] < 5 < 6 < brought["high"] < 6.4, "2.3 / sqrt(40) is a standard error of 0.36"
    assert speed_up == pytest.approx({key: bound / 2 for key, bound in brought.items()})


def test_intervals_of_cost_carry_through(choosing):
    """A round's milliseconds wander from turn to turn, and plain decode's with them: their ratio does not."""
    wandering = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0]
    costs = [cost("cpu", wandering, one={"chain": [2 * ms for ms in wandering]})]
    report = choosing.choose(costs, {"one": accepted({"maths": {"chain": 4}})})
    chain = report["drafters"]["one"]["devices"]["cpu"]["tasks"]["maths"]["arms"]["chain"]
    assert chain["tokens_per_second"]["value"] == pytest.approx(4 / 0.1)
    assert chain["tokens_per_second"]["low"] < 30 < 50 < chain["tokens_per_second"]["high"]
    assert bare(chain["speed_up"]) == pytest.approx(2)


def width(figure):
    return figure["high"] - figure["low"]


def test_tasks_and_devices_are_resampled_apart(choosing):
    """Chance on one says nothing of the others, so a mean is surer than what it is made of."""
    costs = [cost("cpu", 20.0, one={"chain": 40.0})]
    tasks = {"maths": {"chain": SPREAD}, "chat": {"chain": SPREAD}}
    found = choosing.choose(costs, {"one": accepted(tasks)})["drafters"]["one"]["devices"]["cpu"]
    alone = found["tasks"]["maths"]["arms"]["chain"]["speed_up"]
    assert width(found["mean"]["speed_up"]) < 0.8 * width(alone)
    costs = [cost(device, 20.0, one={"chain": [41.0 + 2 * n for n in range(9)]}) for device in ("cpu", "cuda")]
    found = choosing.choose(costs, {"one": accepted({"maths": {"chain": 9}})})["drafters"]["one"]
    assert width(found["score"]) < 0.9 * width(found["devices"]["cpu"]["mean"]["speed_up"])


def test_drafters_are_compared_in_pairs(choosing):
    """One accepts a tenth more than the other on every prompt: shown, though each alone is less certain."""
    costs = [cost("cpu", 20.0, less={"chain": 40.0}, more={"chain": 40.0})]
    documents = {
        "less": accepted({"maths": {"chain": SPREAD}}),
        "more": accepted({"maths": {"chain": [1.1 * tokens for tokens in SPREAD]}}),
    }
    verdict = choosing.choose(costs, documents)["verdict"]
    assert bare(verdict["ahead_of"]["less"]) == pytest.approx(1.1)
    apart = accepted({"maths": {"chain": [1.1 * tokens for tokens in SPREAD[::-1]]}})
    unpaired = choosing.choose(costs, documents | {"more": apart})["verdict"]
    assert unpaired["ahead_of"]["less"]["low"] < 1
    assert "not shown to be ahead of less: +10 %" in unpaired["words"]


# Files that do not belong together

GOOD = {"deep": accepted(DEEP), "thin": accepted(THIN)}


def changed(document, *place, value):
    """A copy with one thing changed; None takes it out."""
    copied = copy.deepcopy(document)
    inner = copied
    for key in place[:-1]:
        inner = inner[key]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return copied


def other_cost(*place, value):
    return [COSTS[0], changed(COSTS[1], *place, value=value)]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([COSTS[0], COSTS[0]], "two cost files are of cpu, which would count twice; give one"),
        (other_cost("model", value="n"), r"model: 'm' \(cpu\) and 'n' \(cuda\) cannot .* same --model"),
        (other_cost("drafters", "thin", value=None), "thin is in cpu but not in cuda, which has deep; name the"),
        (
            other_cost("drafters", "old", value=COSTS[1]["drafters"]["deep"]),
            "old is in cuda but not in cpu, which has deep, thin",
        ),
        (
            other_cost("drafters", "thin", "arms", "tree-16", value=None),
            r"modes of thin: 'chain, tree-16' \(cpu\) and 'chain' \(cuda\) cannot .* the same --budget",
        ),
        (other_cost("drafters", "deep", "weights", value="w"), r"weights of deep: .* measure the same checkpoint"),
    ],
)
def test_costs_that_do_not_belong_together(choosing, costs, message):
    with pytest.raises(ConfigError, match=message):
        choosing.choose(costs, GOOD)


def other_thin(*place, value):
    return GOOD | {"thin": changed(GOOD["thin"], *place, value=value)}


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ({"deep": GOOD["deep"]}, "thin is in --cost but not in --acceptance, which has deep; name the same"),
        (GOOD | {"old": GOOD["deep"]}, "old is in --acceptance but not in --cost, which has deep, thin"),
        (other_thin("model", value="n"), r"model: 'm' \(--cost\) and 'n' \(--acceptance thin\) .* same --model"),
        (other_thin("block_size", value=8), r"block size of thin: 16 \(--cost\) and 8 .* of its own drafter"),
        (other_thin("temperature", value=1.0), "thin is of temperature 1.0, but rounds .* with --temperature 0"),
        (other_thin("max_tokens", value=64), r"max_tokens: 256 \(deep\) and 64 \(thin\) .* in the same way"),
        (other_thin("tasks", "chat", value=None), r"tasks: 'maths, chat' \(deep\) and 'maths' \(thin\)"),
        (other_thin("tasks", "chat", "prompt_hash", value="x"), "rendered prompts of chat: .* same prompts"),
        (
            other_thin("tasks", "chat", "tree-16", value=None),
            "thin, chat: no tree-16, which --cost has; measure with ddtree eval --budget 16, or time other",
        ),
    ],
)
def test_acceptance_that_does_not_belong_to_the_costs(choosing, documents, message):
    with pytest.raises(ConfigError, match=message):
        choosing.choose(COSTS, documents)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [(None, "chat: chain holds no figures of single prompts"), ([[0, 0]] * 40, "no answer took a round of chain")],
)
def test_acceptance_without_figures(choosing, pairs, message):
    with pytest.raises(DataError, match=message):
        choosing.choose(COSTS, other_thin("tasks", "chat", "chain", "per_prompt", value=pairs))


def test_budgets_without_a_cost_are_told(choosing):
    more = {task: arms | {"tree_64": 6} for task, arms in DEEP.items()}
    report = choosing.choose(COSTS, GOOD | {"deep": accepted(more)})
    assert report["arms_without_cost"] == ["tree-64"]
    assert "tree-64" not in report["drafters"]["deep"]["devices"]["cpu"]["tasks"]["maths"]["arms"]


@pytest.mark.parametrize("content", ["{", "[]", '{"verb": "choose"}'])
def test_a_file_that_holds_no_costs(choosing, tmp_path, content):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"cost\.json: .*write (it|one) with"):
        choosing.read_cost(path)


# The table


def test_the_table_of_a_result(benchmark_module, choosing, tmp_path, monkeypatch):
    tables = benchmark_module("tables")
    report = choosing.choose(COSTS, GOOD)
    (tmp_path / "drafter_choice.json").write_text(json.dumps(report))
    monkeypatch.setattr(benchmark_module("tables_common"), "RESULTS", tmp_path)
    assert tables.filled("<!-- table: drafter_choice -->\n<!-- end -->").splitlines()[1:] == [
        "| drafter | maths | chat | mean |",
        "| --- | --: | --: | --: |",
        "| deep (5 layers, 19.4 M), cpu | tree-16, 2.40 [2.40, 2.40] | chain, 1.50 [1.50, 1.50] "
        "| 1.95 [1.95, 1.95] |",
        "| deep (5 layers, 19.4 M), cuda | tree-16, 3.00 [3.00, 3.00] | tree-16, 1.60 [1.60, 1.60] "
        "| 2.30 [2.30, 2.30] |",
        "| thin (5 layers, 19.4 M), cpu | tree-16, 2.00 [2.00, 2.00] | chain, 1.56 [1.56, 1.56] "
        "| 1.78 [1.78, 1.78] |",
        "| thin (5 layers, 19.4 M), cuda | tree-16, 3.20 [3.20, 3.20] | tree-16, 2.40 [2.40, 2.40] "
        "| 2.80 [2.80, 2.80] |",
        "",
        f"cpu: a cpu, float32; cuda: a cuda, float32. {report['verdict']['words']}.",
        "<!-- end -->",
    ]


# Measuring


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A target with a tokenizer of words, and two drafters for it."""
    root = tmp_path_factory.mktemp("models")
    target = toy_target("llama", eos_ids=(5,))
    write_folder(root / "target", target_config(target), target_tensors(target))
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w5").save_pretrained(root / "target")
    write_drafter(root / "one")
    write_drafter(root / "two", block_size=4)
    return root


def test_rounds_of_tiny_models_are_timed_and_chosen_from(benchmark_module, choosing, toy, tmp_path):
    """Both verbs, from models to the verdict. Toys in float64 say in every mode what plain decode says."""
    drafter_choice = benchmark_module("drafter_choice")
    out = tmp_path / "cost.json"
    drafters = f"one={toy / 'one'} two={toy / 'two'}"
    options = "--budget 8 3 --prompts 2 --repeats 2 --max-tokens 12 --device cpu --dtype float64 --threads 1"
    drafter_choice.main(f"cost --model {toy / 'target'} --drafter {drafters} {options} --out {out}".split())
    found = choosing.read_cost(out)
    assert (found["model"], found["device"], found["dtype"], found["threads"]) == ("target", "cpu", "float64", 1)
    assert found["plain"]["tokens_per_round"] == 1
    assert found["plain"]["rounds"] == 4 * 11
    for name, block_size in (("one", 6), ("two", 4)):
        drafter = found["drafters"][name]
        assert (drafter["layers"], drafter["block_size"], drafter["edges"]) == (2, block_size, False)
        assert list(drafter["arms"]) == ["chain", "tree-3", "tree-8"]
        for arm in drafter["arms"].values():
            assert (arm["like_plain"], arm["answers"], len(arm["samples_ms"])) == (4, 4, 4)
            assert arm["ms_per_round"]["low"] > 0
    assert found["provenance"]["versions"]["torch"]
    for name, rate in (("one", 2), ("two", 3)):
        measured = accepted(
            {"maths": {"chain": rate, "tree-3": rate, "tree-8": rate}},
            model="target",
            block_size=found["drafters"][name]["block_size"],
        )
        (tmp_path / f"{name}.json").write_text(json.dumps(measured))
    files = [f"{name}={tmp_path / name}.json" for name in ("one", "two")]
    chosen = tmp_path / "choice.json"
    drafter_choice.main(["choose", "--cost", str(out), "--acceptance", *files, "--out", str(chosen)])
    report = json.loads(chosen.read_text())
    assert sorted(report["verdict"]["ranking"]) == ["one", "two"]


def test_arms_take_turns_at_being_first(benchmark_module):
    """A machine that slows down within a turn slows none of them more than the others."""
    order = []

    def arm(name):
        return SimpleNamespace(run=lambda prompt, tokens: order.append(name))

    benchmark_module("drafter_choice").take_turns({name: arm(name) for name in "abc"}, [[1], [2]], 2, 4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_a_round_costs_the_median(benchmark_module):
    module = benchmark_module("drafter_choice")
    runs = [module.Run(seconds, 10, (1, 2, 3)) for seconds in (0.01, 0.02, 0.09)]
    assert module.figures(runs, runs)["ms_per_round"]["value"] == pytest.approx(2)


def test_a_drafter_is_known_by_its_edges_as_well(benchmark_module, tmp_path):
    spec = SimpleNamespace(block_size=4, decoder=SimpleNamespace(layers=1))
    loaded = SimpleNamespace(edges=None, model=SimpleNamespace(parameters=list, spec=spec))
    known = []
    for content in (b"", b"other"):
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        (tmp_path / "edges.safetensors").write_bytes(content)
        known.append(benchmark_module("drafter_choice").facts(tmp_path, loaded)["weights"])
    assert known[0] != known[1]


def test_rounds_at_the_end_of_an_answer_are_not_timed(benchmark_module, toy, tmp_path, monkeypatch):
    """They draft no further than the answer goes, and cost less than the others."""
    drafter_choice = benchmark_module("drafter_choice")
    plans = []
    within = drafter_choice.RoundPlan.within
    monkeypatch.setattr(
        drafter_choice.RoundPlan, "within", lambda plan, left: plans.append(within(plan, left)) or plans[-1]
    )
    options = "--budget 8 --prompts 1 --repeats 1 --max-tokens 9 --device cpu --dtype float64"
    drafter = f"--drafter one={toy / 'one'}"
    drafter_choice.main(f"cost --model {toy / 'target'} {drafter} {options} --out {tmp_path / 'x.json'}".split())
    assert {(plan.mode, plan.block_size) for plan in plans} == {("off", 1), ("chain", 6), ("tree", 6)}


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        (["plain-folder"], "--drafter takes NAME=FOLDER, so that results can be told apart: got 'plain-folder'"),
        (["a=x", "a=y"], "--drafter names a twice"),
        (["a=shipped"], "no drafter is shipped for target"),
    ],
)
def test_drafters_need_names(benchmark_module, toy, tmp_path, drafters, message):
    arguments = ["cost", "--model", str(toy / "target"), "--drafter", *drafters, "--out", str(tmp_path / "x.json")]
    with pytest.raises(SystemExit, match=message):
        benchmark_module("drafter_choice").main(arguments)
