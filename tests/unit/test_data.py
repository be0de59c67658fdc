"""Prompts from files, what is held out, decoding in batches, and shards of answers."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import zlib
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from ddtree.cli.main import main
from ddtree.data import decode, generate
from ddtree.data.decode import decode_batch, decode_many
from ddtree.data.generate import AnswerPlan, answer_prompts, write_own_prompts
from ddtree.data.prompts import OPENERS, HeldOut, Prompt, read_prompts
from ddtree.errors import DataError, StorageError
from ddtree.models.target import TargetModel
from ddtree.provenance import text_hash
from ddtree.training.examples import load_examples, write_shard
from tests.drafters import plain_forward
from tests.toys import VOCABULARY, random_tokens, toy_target


class WordTokenizer:
    """One token a word: w7 is token 7, other words any token. A chat is its words between 1 and 2."""

    def encode(self, text):
        return [
            int(word[1:]) if re.fullmatch(r"w\d+", word) else zlib.crc32(word.encode()) % VOCABULARY
            for word in text.split()
        ]

    def decode(self, tokens):
        return " ".join(f"w{token}" for token in tokens)

    def chat_ids(self, messages):
        return [1, *(token for message in messages for token in self.encode(message["content"])), 2]

    def user_prefix(self):
        return [1]


TOKENIZER = WordTokenizer()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def lines(folder, *rows):
    """A JSONL file of rows; strings stand as they are."""
    path = folder / "prompts.jsonl"
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


# Prompts from files


def test_every_form_of_a_line(tmp_path):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}]
    path = lines(
        tmp_path,
        {"prompt": "one", "source": "here", "license": "MIT"},
        "   ",
        {"turns": ["two", "and then"]},
        {"messages": chat},
        {"prompt": "", "turns": ["three"]},
    )
    prompts, broken = read_prompts(path)
    assert broken == 0
    assert prompts[0] == Prompt((("user", "one"),), "here", "MIT")
    assert prompts[1] == Prompt((("user", "two"),), "unknown", "unknown")
    assert prompts[2].as_chat() == chat
    assert prompts[2].text == "Be short.\nHi."
    assert prompts[3].text == "three"


def test_texts_may_hold_other_line_separators(tmp_path):
    """JSON lines end at line feeds and nowhere else; Windows line ends do no harm."""
    texts = ["one\u2028two", "one\u2029two", "one\x85two", "one\x7ftwo", "tab\tand\nline feed"]
    path = lines(tmp_path, *({"prompt": text} for text in texts))
    assert [prompt.text for prompt in read_prompts(path)[0]] == texts
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [prompt.text for prompt in read_prompts(path)[0]] == texts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"line 3: Expecting property name"),
        ('{"prompt": "cut off', r"line 3: Unterminated string"),
        ("7", r"line 3: a JSON object is needed, got int"),
        ([1], r"line 3: a JSON object is needed, got list"),
        ({}, r"line 3: needs a non-empty text `prompt`, or `messages`"),
        ({"prompt": " \n"}, r"line 3: needs a non-empty"),
        ({"prompt": 5}, r"line 3: needs"),
        ({"turns": []}, r"line 3: needs"),
        ({"turns": "text"}, r"line 3: needs"),
        ({"messages": []}, r"line 3: needs"),
        ({"messages": "text"}, r"line 3: needs"),
        ({"messages": [{"role": "user"}]}, r"line 3: needs"),
        ({"messages": [{"role": "user", "content": None}]}, r"line 3: needs"),
        ('{"prompt": "half a pair \\ud83d"}', r"line 3: holds half of a surrogate pair"),
        ('{"prompt": "whole", "license": "\\udc00"}', r"line 3: holds half of a surrogate pair"),
    ],
)
def test_a_broken_line_is_named_or_skipped_and_counted(tmp_path, row, message):
    """Empty lines count too, so that the number is the one an editor shows."""
    path = lines(tmp_path, {"prompt": "first"}, "", row, {"prompt": "last"}, row)
    with pytest.raises(DataError, match=rf"prompts\.jsonl, {message}.*--skip-broken"):
        read_prompts(path)
    prompts, broken = read_prompts(path, skip_broken=True)
    assert [prompt.text for prompt in prompts] == ["first", "last"]
    assert broken == 2


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: no such file; give a JSONL file"):
        read_prompts(tmp_path / "none.jsonl")
    for content, message in [(b"", "holds no prompts"), (b"\n\n", "holds no prompts"), (b'\xff{"', "not UTF-8")]:
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=rf"bad\.jsonl: {message}"):
            read_prompts(tmp_path / "bad.jsonl")
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(lines(tmp_path, "{", "["), skip_broken=True)
    with pytest.raises(DataError, match="is a folder; give a JSONL file"):
        read_prompts(tmp_path)
    with pytest.raises(DataError, match=r"bad\.jsonl/x: cannot be read \(Not a directory\)"):
        read_prompts(tmp_path / "bad.jsonl" / "x")


# What is held out


def test_eight_words_in_a_row_are_held_out():
    words = ["how", "many", "apples", "does", "a", "farmer", "with", "ten", "trees", "pick", "in", "one", "summer"]
    held_out = HeldOut([" ".join(words)])
    for first in range(len(words) - 7):
        run = " ".join(words[first : first + 8])
        assert held_out.touches(run)
        assert held_out.touches(f"Tell me: {run.upper()}?!")
        assert held_out.touches(f"so,\n{run.replace(' ', ', ')} then")
        assert not held_out.touches(" ".join(words[first : first + 7]))
        assert not held_out.touches(run.replace(words[first + 3], "other"))
    assert not held_out.touches(" ".join(reversed(words)))


def test_short_texts_are_held_out_whole():
    held_out = HeldOut(["What is two plus two?", "", "?!"])
    assert held_out.touches("what is TWO plus two")
    assert not held_out.touches("what is two plus three")
    assert not held_out.touches("what is two")
    assert not held_out.touches("")
    assert not held_out.touches("...")


# Decoding in batches


def greedy_alone(target, prompt, max_tokens, stop_ids):
    """One token at a time, each from a pass over the whole text."""
    text = list(prompt)
    while len(text) - len(prompt) < max_tokens:
        text.append(int(plain_forward(target, text)[0][-1].argmax()))
        if text[-1] in stop_ids:
            return text[len(prompt) :], True
    return text[len(prompt) :], False


LENGTHS = (3, 17, 1, 9, 17, 6)
PROMPTS = [random_tokens(length, 40 + i) for i, length in enumerate(LENGTHS)]
STOPS = (57, 2)  # places 4 to 31 of these answers, and one answer goes on


@pytest.fixture(scope="module")
def target():
    return toy_target("qwen3", spread=0.35)


@pytest.fixture(scope="module")
def alone(target):
    answers = [greedy_alone(target, prompt, 40, STOPS) for prompt in PROMPTS]
    ends = [len(tokens) for tokens, _ in answers]
    assert len(set(ends)) >= 4, "answers end at different times, or this tests little"
    assert not all(ended for _, ended in answers)
    return answers


@pytest.mark.parametrize("prefill_tokens", [65536, 30, 6, 1])
@pytest.mark.parametrize("step", [64, 5, 1])
def test_a_batch_says_what_each_prompt_says_alone(target, alone, monkeypatch, prefill_tokens, step):
    """Prompts of 1 to 17 tokens, prefilled at once or in columns of 5 or 1, spans in steps of 64, 5 or 1."""
    widths, spans, forward = [], [], TargetModel.forward

    def watched(self, rows, cache, *arguments):
        assert rows.span <= cache.shape.capacity
        widths.append(rows.tokens_RN.shape[1])
        spans.append(rows.span)
        return forward(self, rows, cache, *arguments)

    monkeypatch.setattr(decode, "PREFILL_TOKENS", prefill_tokens)
    monkeypatch.setattr(decode, "SPAN_STEP", step)
    monkeypatch.setattr(TargetModel, "forward", watched)
    options = {"max_tokens": 40, "temperature": 0.0, "generator": seeded()}
    assert decode_batch(target, PROMPTS, stop_ids=STOPS, **options) == alone
    chunk = min(max(prefill_tokens // len(PROMPTS), 1), 17)
    chunks = -(-17 // chunk)
    assert widths == [chunk] * (chunks - 1) + [17 - (chunks - 1) * chunk] + [1] * 39
    assert all(span % step == 0 for span in spans[chunks:])
    one_by_one = [decode_batch(target, [prompt], stop_ids=STOPS, **options)[0] for prompt in PROMPTS]
    assert one_by_one == alone


@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_batch_shrinks_as_its_rows_end(target, monkeypatch, every):
    """Rows that have ended are dropped, in whatever order they end, and nobody's answer changes."""
    rows, forward = [], TargetModel.forward

    def watched(self, given, cache, *arguments):
        rows.append(given.tokens_RN.shape[0])
        return forward(self, given, cache, *arguments)

    monkeypatch.setattr(TargetModel, "forward", watched)
    options = {"max_tokens": 40, "temperature": 0.0, "stop_ids": (*STOPS, 4, 16, 37), "generator": seeded()}
    alone = [decode_batch(target, [prompt], **options)[0] for prompt in PROMPTS]
    rows.clear()
    monkeypatch.setattr(decode, "CHECK_STEPS", every)
    assert decode_batch(target, PROMPTS, **options) == alone
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0] == len(PROMPTS)


def test_a_batch_stops_soon_after_its_last_end(target, monkeypatch):
    calls, forward = [], TargetModel.forward
    monkeypatch.setattr(TargetModel, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    options = {"max_tokens": 400, "temperature": 0.0, "generator": seeded()}
    answers = decode_batch(target, PROMPTS, stop_ids=(*STOPS, 4, 16, 37), **options)
    assert all(ended for _, ended in answers)
    assert len(calls) <= max(len(tokens) for tokens, _ in answers) + 17
    assert decode_batch(target, PROMPTS[:2], stop_ids=(), **options | {"max_tokens": 1}) == [
        (greedy_alone(target, prompt, 1, ())[0], False) for prompt in PROMPTS[:2]
    ]


def test_many_prompts_go_batch_by_batch_similar_lengths_together(target, alone):
    options = {"max_tokens": 40, "temperature": 0.0, "stop_ids": STOPS, "generator": seeded()}
    batches = list(decode_many(target, PROMPTS, batch=4, **options))
    assert [[d.index for d in batch] for batch in batches] == [[2, 0, 5, 3], [1, 4]]
    found = {d.index: (d.tokens, d.ended) for batch in batches for d in batch}
    assert [found[i] for i in range(len(PROMPTS))] == alone


def test_sampled_answers_repeat_with_the_generator(target):
    def sampled(seed, temperature=1.0):
        options = {"max_tokens": 30, "temperature": temperature, "stop_ids": STOPS, "generator": seeded(seed)}
        return decode_batch(target, PROMPTS, **options)

    assert sampled(5) == sampled(5)
    assert sampled(5) != sampled(6)
    assert sampled(5, 1e-3) == sampled(6, 1e-3), "next to no temperature, next to no choice"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_tokens_follow_the_target(target, temperature):
    """First tokens of 4,000 rows, chi-square over the tokens expected often enough; fixed seed and level."""
    prompt, rows = PROMPTS[0], 4000
    options = {"max_tokens": 1, "temperature": temperature, "stop_ids": (), "generator": seeded(11)}
    counts = Counter(tokens[0] for tokens, _ in decode_batch(target, [prompt] * rows, **options))
    wanted = ((plain_forward(target, prompt)[0][-1] / temperature).softmax(0) * rows).tolist()
    often = [token for token in range(VOCABULARY) if wanted[token] >= 8]
    assert len(often) > 10
    rest = rows - sum(wanted[token] for token in often), rows - sum(counts[token] for token in often)
    result = chisquare([*(counts[t] for t in often), rest[1]], [*(wanted[t] for t in often), rest[0]])
    assert result.pvalue > 1e-3


# Shards of answers

PLAN = AnswerPlan("toy", max_tokens=12, max_length=40, batch=3, shard=4, seed=3)
TEXTS = [" ".join(f"w{token}" for token in random_tokens(2 + i % 5, 80 + i)) for i in range(10)]
ASKED = [Prompt((("user", text),), "here" if i % 3 else "there", "MIT") for i, text in enumerate(TEXTS)]
NOTHING = HeldOut([])


@pytest.fixture(scope="module")
def ending():
    return toy_target("qwen3", spread=0.35, eos_ids=STOPS)


def answers_of(folder):
    """All examples as (prompt ids, answer ids), in the order of the shards."""
    examples = load_examples(folder, VOCABULARY, 1000)
    tokens = examples.tokens_T.tolist()
    places = torch.stack([examples.starts_E, examples.prompts_E, examples.ends_E], dim=1).tolist()
    return [(tuple(tokens[a:b]), tuple(tokens[b:c])) for a, b, c in places]


def test_shards_hold_prompts_and_the_targets_own_answers(ending, tmp_path):
    reports = list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path, PLAN, NOTHING))
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "answers-t000-p0-00000.safetensors",
        "answers-t000-p0-00001.safetensors",
        "answers-t000-p0-00002.safetensors",
        "card-t000-p0.json",
    ]
    wanted = {}
    for prompt in ASKED:
        ids = TOKENIZER.chat_ids(prompt.as_chat())
        wanted[tuple(ids)] = tuple(greedy_alone(ending, ids, 12, STOPS)[0])
    found = answers_of(tmp_path)
    usable = {ids: answer for ids, answer in wanted.items() if len(answer) > 1}
    assert dict(found) == usable
    assert len(found) == len(usable)
    assert any(answer[-1] in STOPS for answer in usable.values()), "an end of sequence is part of its answer"
    assert reports[-1].done == reports[-1].total == 10
    assert reports[-1].tokens == sum(map(len, wanted.values()))
    assert [report.done for report in reports] == [3, 4, 7, 8, 10]


def test_the_card_says_how_the_answers_came_to_be(ending, tmp_path):
    held_out = HeldOut([TEXTS[4]])
    long = Prompt((("user", " ".join(["w5"] * 23)),), "here", "MIT")
    asked = [*ASKED, ASKED[0], long, ASKED[2]]
    plan = dataclasses.replace(PLAN, temperature=0.7)
    list(answer_prompts(ending, TOKENIZER, asked, tmp_path, plan, held_out, part=1))
    text = (tmp_path / "card-t070-p1.json").read_text(encoding="utf-8")
    card = json.loads(text)
    kept = [prompt for prompt in ASKED if prompt.text != TEXTS[4]]
    assert card["prompts"] == 9
    assert card["left_out"] == {"repeated": 2, "shares words with held-out prompts": 1, "too long": 1}
    assert card["sources"] == dict(Counter(prompt.source for prompt in kept))
    assert card["licenses"] == {"MIT": 9}
    assert card["prompt_hash"] == text_hash(prompt.text for prompt in kept)
    assert card["plan"] == dataclasses.asdict(plan)
    assert set(card["provenance"]) >= {"commit", "argv", "time", "versions", "device"}
    assert str(tmp_path) not in text
    assert (tmp_path / "answers-t070-p1-00002.safetensors").exists()
    # One token fewer and it fits: chat markers, 22 words, and room for 16 of the answer.
    fitting = Prompt((("user", " ".join(["w5"] * 22)),), "here", "MIT")
    list(answer_prompts(ending, TOKENIZER, [fitting], tmp_path / "fits", PLAN, NOTHING))
    assert json.loads((tmp_path / "fits" / "card-t000-p0.json").read_text())["left_out"] == {}


def killed_at(monkeypatch, batch):
    """decode_many that dies before the given batch, as often as it is called."""
    whole, seen = decode_many, []

    def dying(*arguments, **options):
        for found in whole(*arguments, **options):
            if len(seen) == batch:
                raise KeyboardInterrupt
            seen.append(found)
            yield found

    monkeypatch.setattr(generate, "decode_many", dying)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_killed_run_goes_on_where_it_was(ending, tmp_path, monkeypatch, temperature):
    """Killed inside the second shard: the first is kept as it is, and the rest is what one run would have made."""
    plan = dataclasses.replace(PLAN, temperature=temperature)
    list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path / "whole", plan, NOTHING))
    killed_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path / "cut", plan, NOTHING))
    monkeypatch.undo()
    (first,) = (tmp_path / "cut").iterdir()
    stamp = first.stat().st_mtime_ns
    reports = list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path / "cut", plan, NOTHING))
    assert [report.done for report in reports] == [4, 7, 8, 10]
    assert first.stat().st_mtime_ns == stamp
    names = [path.name for path in sorted((tmp_path / "whole").iterdir())]
    assert [path.name for path in sorted((tmp_path / "cut").iterdir())] == names
    for name in names[:3]:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def full_disk(tensors, path, metadata):
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_shard_is_whole_or_not_there(ending, tmp_path, monkeypatch):
    """A full disk is reported as one and leaves nothing behind, and the next run makes the shard anew."""
    monkeypatch.setattr("ddtree.training.examples.save_file", full_disk)
    with pytest.raises(StorageError, match=r"00000\.safetensors: cannot be written .*No space left.*; free some"):
        list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path, PLAN, NOTHING))
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="make answers first"):
        load_examples(tmp_path, VOCABULARY, 64)
    monkeypatch.undo()
    list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path, PLAN, NOTHING))
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "other"}, "model toy, not other"),
        ({"temperature": 0.001}, r"temperature 0\.0, not 0\.001"),
        ({"seed": 4}, "seed 3, not 4"),
        ({"max_tokens": 6}, "max_tokens 12, not 6"),
        ({"prompts": ASKED[3:]}, "prompt_hash .*, not "),
        ({"prompts": ASKED[:4]}, "prompt_hash .*, not "),
    ],
)
def test_shards_of_another_run_are_not_taken_for_this_ones(ending, tmp_path, monkeypatch, changed, message):
    """A card must tell the truth about the shards beside it, so a folder holds one run, finished or killed."""
    plan = dataclasses.replace(PLAN, **{key: value for key, value in changed.items() if key != "prompts"})
    killed_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path, PLAN, NOTHING))
    monkeypatch.undo()
    for _ in range(2):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(DataError, match=f"was made with {message}.*; a folder holds one run: choose another"):
            list(answer_prompts(ending, TOKENIZER, changed.get("prompts", ASKED), tmp_path, plan, NOTHING))
        assert sorted(tmp_path.iterdir()) == before
        list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path, dataclasses.replace(PLAN, batch=2), NOTHING))


def test_damaged_and_nameless_shards_are_not_taken_for_done(ending, tmp_path):
    path = tmp_path / "answers-t000-p0-00000.safetensors"
    write_shard(path, [([1, 2, 3], 1)], {})
    with pytest.raises(DataError, match="was made with model unknown, not toy"):
        list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path, PLAN, NOTHING))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"truncated or damaged .*; delete it and make it again"):
        list(answer_prompts(ending, TOKENIZER, ASKED, tmp_path, PLAN, NOTHING))


# Prompts of the target's own

WEIGHT = sum(weight for _, weight in OPENERS)


def own_prompts(target, path, count=2 * WEIGHT, seed=3):
    plan = dataclasses.replace(PLAN, seed=seed)
    return write_own_prompts(target, TOKENIZER, count, plan, TOKENIZER.user_prefix(), path)


def test_own_prompts_are_turns_that_ended_and_are_kept(ending, tmp_path, monkeypatch):
    path = tmp_path / "own-prompts-p0.jsonl"
    batches = []

    def watched(*arguments, **options):
        for found in decode_many(*arguments, **options):
            batches.append((arguments[1], found))
            yield found

    monkeypatch.setattr(generate, "decode_many", watched)
    prompts = own_prompts(ending, path)
    assert [prompt.source for prompt in prompts] == ["self-generated"] * len(prompts)
    texts = [prompt.text for prompt in prompts]
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) >= 12
    starts = [opener for opener, weight in OPENERS for _ in range(2 * weight)]
    made = set()
    for prefixes, found in batches:
        for decoded in found:
            opener = starts[decoded.index]
            assert prefixes[decoded.index] == [1, *TOKENIZER.encode(opener)]
            text = (opener + TOKENIZER.decode(decoded.tokens[:-1])).strip()
            if decoded.ended and len(text) >= 12:
                made.add(text)
    assert made == set(texts)
    assert len(made) > WEIGHT
    # Kept, and read from there the next time.
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    monkeypatch.setattr(generate, "decode_many", None)
    assert own_prompts(ending, path, seed=4) == prompts


def test_own_prompts_differ_by_seed_and_are_written_whole(ending, tmp_path, monkeypatch):
    first, second = (own_prompts(ending, tmp_path / f"{seed}.jsonl", seed=seed) for seed in (3, 4))
    assert first == own_prompts(ending, tmp_path / "again.jsonl", seed=3)
    assert first != second
    killed_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        own_prompts(ending, tmp_path / "cut.jsonl")
    assert not (tmp_path / "cut.jsonl").exists()


def test_no_own_prompt_at_all_is_kept_too(target, tmp_path):
    """A target that never ends its turns writes none; the second run of a stage must not fail where the first
    did not."""
    path = tmp_path / "own-prompts-p0.jsonl"
    assert own_prompts(target, path, count=4) == []
    assert own_prompts(target, path, count=4) == []


# The verb


def data_of_parts(monkeypatch, folder, *options):
    """Run `ddtree data` with stand-ins for the model; returns what it asked of them: (prompts, plan, part) of each
    pass, and (count, seed, file) of each set of own prompts."""
    asked, own = [], []

    class Local:
        def __init__(self, *arguments, **options):
            self.folder, self.name, self.device = folder, "toy", torch.device("meta")

    def answers(target, tokenizer, prompts, out, plan, excluded, part):
        asked.append((prompts, plan, part))
        return iter(())

    def written(target, tokenizer, count, plan, prefix, path):
        own.append((count, plan.seed, path.name))
        return [Prompt((("user", f"own {path.name}"),), "self-generated", "")]

    monkeypatch.setattr("ddtree.models.hub.locate", Local)
    monkeypatch.setattr("ddtree.models.load.load_target", Local)
    monkeypatch.setattr("ddtree.models.tokenizer.ChatTokenizer", lambda folder: TOKENIZER)
    monkeypatch.setattr(generate, "answer_prompts", answers)
    monkeypatch.setattr(generate, "write_own_prompts", written)
    path = lines(folder, *({"prompt": text} for text in TEXTS))
    with pytest.raises(SystemExit) as end:
        main(["data", "--out", str(folder / "out"), "--prompts", str(path), *options])
    assert not end.value.code
    return asked, own


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_parts_share_out_the_prompts(monkeypatch, tmp_path, parts):
    seen, seeds = [], set()
    for part in range(1, parts + 1):
        asked, own = data_of_parts(
            monkeypatch, tmp_path, "--part", f"{part}/{parts}", "--own", "24", "--seed", "5"
        )
        ((prompts, plan, number),) = asked
        assert number == part - 1
        assert [count for count, *_ in own] == [24 // parts]
        assert own[0][2] == f"own-prompts-p{number}.jsonl"
        seen += [prompt.text for prompt in prompts if prompt.source != "self-generated"]
        seeds |= {plan.seed, own[0][1]}
    assert sorted(seen) == sorted(TEXTS), "each prompt in exactly one part"
    assert len(seeds) == parts


def test_a_pass_for_each_temperature_and_a_limit(monkeypatch, tmp_path):
    asked, own = data_of_parts(monkeypatch, tmp_path, "--temperature", "0", "--temperature", "0.8", "--limit", "4")
    assert [(plan.temperature, [p.text for p in prompts]) for prompts, plan, _ in asked] == [
        (0.0, TEXTS[:4]),
        (0.8, TEXTS[:4]),
    ]
    assert own == []


def test_threads_are_measured_unless_given(monkeypatch, tmp_path):
    used = []
    monkeypatch.setattr("ddtree.cli.data.use_threads", lambda target, rows, asked: used.append((rows, asked)))
    data_of_parts(monkeypatch, tmp_path)
    data_of_parts(monkeypatch, tmp_path, "--threads", "3", "--batch", "7")
    assert used == [(64, 0), (7, 3)]
