"""What a request emits: it ends at whichever token of a committed path ends it, and its text is never broken."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.engine.output import BROKEN, Emitted, Output
from ddtree.models.load import LoadedDrafter
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import fixed_plan
from tests.drafters import LAYERS, OracleDrafter, draft_with, pieces, records_of, tokens_of
from tests.toys import MASK, VOCABULARY, random_tokens, toy_drafter, toy_target

EOS, OTHER_EOS = 250, 251
SPECIAL = range(250, 256)


def byte_decode(tokens) -> str:
    """A token is a byte; the last few are special tokens without text."""
    return bytes(token for token in tokens if token not in SPECIAL).decode("utf-8", errors="replace")


def plenty(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=10**6, **changes)


def push_all(output: Output, chunks) -> list[Emitted]:
    """Push chunk after chunk until the request says that it has ended."""
    emitted = []
    for chunk in chunks:
        if output.finish_reason is None:
            emitted.append(output.push(chunk))
    return emitted


def chunked(tokens, sizes):
    """Consecutive chunks of these sizes, over and over."""
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(tokens):
            return
        yield tokens[start : start + size]
        start += size


def text_of(emitted) -> str:
    return "".join(one.text for one in emitted)


def ids_of(emitted) -> list[int]:
    return [token for one in emitted for token in one.token_ids]


def answer(tokens, params, sizes=(1,), decode=byte_decode, eos=(EOS, OTHER_EOS)):
    """(text, token ids, finish reason) of an answer whose tokens come in chunks of these sizes."""
    output = Output(params, eos, decode)
    emitted = push_all(output, chunked(tokens, sizes))
    assert tuple(ids_of(emitted)) == output.token_ids
    assert all(one.finish_reason is None for one in emitted[:-1])
    return text_of(emitted), ids_of(emitted), output.finish_reason


# Ends

PATH = list(b"abcdefgh")


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("place", range(len(PATH)))
@pytest.mark.parametrize("end", [EOS, OTHER_EOS, ord("!")])
def test_an_end_at_every_place_of_a_committed_path(end, place, before):
    """The end token is emitted, what stands behind it never is, and neither is its text."""
    params = plenty(stop_token_ids=[ord("!")])
    output = Output(params, (EOS, OTHER_EOS), byte_decode)
    started = list(b"12345"[:before])
    if started:
        assert output.push(started) == Emitted("12345"[:before], tuple(started), None)
    path = [*PATH]
    path[place] = end
    emitted = output.push(path)
    assert emitted.token_ids == tuple(path[: place + 1])
    assert emitted.finish_reason == output.finish_reason == "stop"
    assert emitted.text == bytes(PATH[:place]).decode() + ("!" if end == ord("!") else "")
    assert output.token_ids == (*started, *path[: place + 1])
    with pytest.raises(AssertionError, match="has ended"):
        output.push([1])


@pytest.mark.parametrize("limit", range(1, 21))
@pytest.mark.parametrize("sizes", [(1,), (4,), (8,), (3, 1, 15)])
def test_exactly_as_many_tokens_as_asked_for(limit, sizes):
    tokens = list(range(40, 100))
    text, ids, reason = answer(tokens, SamplingParams(max_tokens=limit), sizes)
    assert (ids, reason) == (tokens[:limit], "length")
    assert text == byte_decode(tokens[:limit])


@pytest.mark.parametrize("sizes", [(1,), (2,), (7,)])
def test_tokens_left_counts_down(sizes):
    output = Output(SamplingParams(max_tokens=9), (), byte_decode)
    for chunk in chunked(PATH, sizes):
        before = output.tokens_left
        output.push(chunk)
        assert output.tokens_left == before - len(chunk) == 9 - len(output.token_ids)


def test_an_end_that_is_also_the_last_token_asked_for_is_a_stop():
    assert answer([65, EOS], SamplingParams(max_tokens=2), (2,)) == ("A", [65, EOS], "stop")
    assert answer([65, 66], SamplingParams(max_tokens=2, stop="B"), (2,)) == ("A", [65, 66], "stop")


def test_an_end_token_may_be_ignored_but_not_one_that_was_asked_for():
    tokens = [65, EOS, 66, OTHER_EOS, 67]
    assert answer(tokens, plenty(), (5,)) == ("A", [65, EOS], "stop")
    assert answer(tokens, plenty(ignore_eos=True), (5,)) == ("ABC", tokens, None)
    assert answer(tokens, plenty(ignore_eos=True, stop_token_ids=[OTHER_EOS]), (5,)) == ("AB", tokens[:4], "stop")
    assert answer(tokens, plenty(), (5,), eos=()) == ("ABC", tokens, None)


@pytest.mark.parametrize("eos", [(EOS,), (OTHER_EOS, EOS), {0}, (0, 7)])
def test_whatever_the_ids_of_the_end_are(eos):
    """Token 0 is a token like any other, and can be an end like any other."""
    for end in eos:
        assert answer([65, end, 66], plenty(), (3,), eos=eos)[1:] == ([65, end], "stop")
    assert answer([65, 0, 66], plenty(), (3,), eos=(EOS,))[1:] == ([65, 0, 66], None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_full_context_ends_a_request_by_length(size):
    output = Output(plenty(), (EOS,), byte_decode)
    assert output.push(list(b"abc"[:size]), more_fits=False).finish_reason == "length"
    output = Output(plenty(), (EOS,), byte_decode)
    assert output.push([65, EOS], more_fits=False).finish_reason == "stop"
    # What was held back comes out all the same.
    output = Output(plenty(stop="bcd"), (EOS,), byte_decode)
    assert output.push(list(b"abc"), more_fits=False) == Emitted("abc", tuple(b"abc"), "length")


def test_the_mask_is_a_token_like_any_other():
    """A buffer full of masks once ended answers, and tokens that equal the mask were once dropped."""
    tokens = [65, MASK, MASK, 66]
    assert answer(tokens, plenty(), (4,)) == ("A<<B", tokens, None)
    assert answer(tokens, plenty(stop_token_ids=[MASK]), (4,)) == ("A<", [65, MASK], "stop")


@pytest.mark.parametrize("mode", ["off", "chain", "tree"])
def test_a_target_that_says_the_mask(mode):
    target = toy_target(layers=2)
    drafter = LoadedDrafter(*toy_drafter(target, layers=1, layer_ids=LAYERS))
    engine = BatchEngine(target, drafter, EngineConfig(max_context=128), byte_decode)
    params = SamplingParams(temperature=1, seed=1, max_tokens=60, logit_bias={MASK: 4.0})
    prompt = random_tokens(9, 1)
    expected = tokens_of(pieces(engine, prompt, params, fixed_plan("off", 1, 0)))
    assert 5 < expected.count(MASK) < 55
    draft_with(engine, OracleDrafter([prompt + expected], VOCABULARY))
    said = pieces(engine, prompt, params, fixed_plan(mode, 8, 16))
    assert tokens_of(said) == expected
    assert "".join(piece.text for piece in said) == byte_decode(expected)
    assert mode == "off" or any(len(record.path) > 2 for record in records_of(said))


# Whole characters

WORDS = "naïve 日本語, 😀👩‍👩‍👧 ÅŁ\n\t ﷽ \U0001d518\U0001d52b, e\u0301!"
BYTES = st.binary(max_size=24).map(lambda b: [byte for byte in b if byte not in SPECIAL])
TEXTS = st.text(max_size=12).map(lambda t: list(t.encode())) | BYTES | st.just(list(WORDS.encode()))
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=8)


def as_special(tokens, where):
    """The tokens with special ones thrown in."""
    for place in where:
        tokens = [*tokens[: place % (len(tokens) + 1)], EOS + 2, *tokens[place % (len(tokens) + 1) :]]
    return tokens


@given(TEXTS, SIZES, st.lists(st.integers(0, 30), max_size=3))
@settings(max_examples=400, deadline=None)
@example(list("a\ufffdb".encode()), [1], [])
@example([0xE2, 0x82, 0xE2, 0x82, 0xAC, 0xFF], [1], [])
def test_pieces_joined_are_the_whole_text(tokens, sizes, where):
    tokens = as_special(tokens, where)
    output = Output(plenty(), (EOS,), byte_decode)
    shown = text_of(push_all(output, chunked(tokens, sizes)))
    whole = byte_decode(tokens)
    assert whole.startswith(shown)
    assert whole[len(shown) :].replace(BROKEN, "") == "" or whole.endswith(BROKEN)
    assert shown + output.push([EOS]).text == whole


@given(st.text(max_size=12), SIZES)
@settings(max_examples=200, deadline=None)
@example(WORDS, [1])
def test_a_piece_never_ends_inside_a_character(text, sizes):
    """Valid text stays valid in every piece, and is shown whenever the tokens end with a whole character."""
    text = "".join(c for c in text if c != BROKEN) + "x"
    tokens = list(text.encode())
    output, shown, pushed = Output(plenty(), (EOS,), byte_decode), "", 0
    for chunk in chunked(tokens, sizes):
        piece = output.push(chunk).text
        assert BROKEN not in piece
        shown, pushed = shown + piece, pushed + len(chunk)
        so_far = bytes(tokens[:pushed]).decode(errors="ignore")
        assert so_far.startswith(shown)
        assert shown == so_far or len(so_far.encode()) < pushed
    assert shown == text


@pytest.mark.parametrize("end", [EOS, None])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_character_that_is_never_finished_comes_last(end, size):
    """Bytes of a broken character come out once nothing can follow them, by an end token or by length."""
    tokens = list("né😀".encode())[:-1] + ([end] if end else [])
    params = SamplingParams(max_tokens=len(tokens))
    text, ids, reason = answer(tokens, params, (size,))
    assert (text, ids, reason) == ("né" + BROKEN, tokens, "stop" if end else "length")


# A tokenizer that is real


BYTE_LEVEL = ByteLevel(add_prefix_space=False, use_regex=False)


def made_of_bytes() -> Tokenizer:
    """Byte-level BPE as in Llama 3 and Qwen: every byte is a token, and merges do not ask for characters."""
    (euro, _), (word, _), (end, _) = (BYTE_LEVEL.pre_tokenize_str(text)[0] for text in (" €", "日本", "END"))
    # " €" without its last byte, the end of one character with the start of the next, a plain word.
    merges = [(euro[0], euro[1]), (euro[:2], euro[2]), (word[2], word[3]), (end[0], end[1]), (end[:2], end[2])]
    tokens = ["<end>", *sorted(ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = BYTE_LEVEL
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


TOKENIZER = made_of_bytes()
REAL_EOS = TOKENIZER.token_to_id("<end>")


def real_decode(tokens) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=True)


def test_the_real_tokenizer_splits_and_mixes_characters():
    """Or it would prove nothing: a token that is a part of a character, and one with text before such a part."""
    texts = [real_decode([token]) for token in range(TOKENIZER.get_vocab_size())]
    assert {BROKEN, " " + BROKEN, 2 * BROKEN, "END", ""} <= set(texts)
    for text in (" €5", "日本", "THE END"):
        assert len(TOKENIZER.encode(text).ids) < len(text.encode())
        assert real_decode(TOKENIZER.encode(text).ids) == text


REAL = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=16)
REAL |= st.text("日本語€😀—é the END", max_size=12).map(lambda text: TOKENIZER.encode(text).ids)


@given(REAL, SIZES)
@settings(max_examples=300, deadline=None)
def test_pieces_of_a_real_tokenizer(tokens, sizes):
    tokens = [token for token in tokens if token != REAL_EOS]
    output = Output(plenty(), (REAL_EOS,), real_decode)
    emitted = push_all(output, chunked(tokens, sizes))
    last = output.push([REAL_EOS])
    assert text_of(emitted) + last.text == real_decode(tokens)
    valid = BROKEN not in real_decode(tokens)
    assert not valid or BROKEN not in "".join(one.text for one in emitted)
    assert all(not one.text.endswith(BROKEN) for one in emitted)


# Tokenizers whose tokens read differently at the start of a text

SPACED = [" one", " two", "three", " ", " four,"]


def spaced_decode(tokens) -> str:
    """As SentencePiece does it: a text does not begin with the space of its first word. Higher ids are special."""
    return "".join(SPACED[token] for token in tokens if token < len(SPACED)).removeprefix(" ")


@given(st.lists(st.integers(0, len(SPACED) - 1), min_size=1, max_size=10), SIZES)
@settings(max_examples=200, deadline=None)
def test_spaces_between_words_survive_streaming(tokens, sizes):
    text, _, _ = answer([*tokens, 99], plenty(), sizes, spaced_decode, eos=(99,))
    assert text == spaced_decode(tokens)


@pytest.mark.parametrize("special", [[50], [50, 51]])
def test_spaces_survive_a_token_without_text(special):
    tokens = [0, *special, 1]
    assert answer([*tokens, 99], plenty(), (1,), spaced_decode, eos=(99,))[0] == spaced_decode(tokens) == "one two"


# Stop strings

STOPS = ["END", "ENDE", "NDX", "€", "aab", "日本"]


def cut_at_stop(pieces_of_tokens, stops):
    """The text up to the first stop string, read token by token: an independent reading of the rule.

    pieces_of_tokens: (tokens so far, their text without unfinished characters) after each token.
    """
    for count, text in pieces_of_tokens:
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], count
    return None


@given(
    st.lists(st.sampled_from(["E", "N", "D", "X", "a", "b", "€", "日", "本", "é", " "]), max_size=14),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
    SIZES,
)
@settings(max_examples=400, deadline=None)
@example(list("aaab"), ["aab"], [1])
@example(list("ENENDX"), ["END"], [2])
@example(list("xEND"), ["ENDE", "NDX", "END"], [4])
def test_stop_strings_in_any_chunks(letters, stops, sizes):
    """Overlapping prefixes, strings over chunks and bytes: text and tokens are those of one token at a time."""
    tokens = list("".join(letters).encode())
    so_far = [(n, bytes(tokens[:n]).decode(errors="ignore")) for n in range(1, len(tokens) + 1)]
    cut = cut_at_stop(so_far, stops)
    params = plenty(stop=stops)
    text, ids, reason = answer([*tokens, EOS], params, sizes)
    if cut is None:
        assert (text, ids, reason) == ("".join(letters), [*tokens, EOS], "stop")
    else:
        assert (text, ids, reason) == (cut[0], tokens[: cut[1]], "stop")


@given(
    st.lists(st.sampled_from(["E", "N", "D", "x", "é"]), max_size=10),
    st.lists(st.sampled_from(["END", "NDE", "EE"]), min_size=1, max_size=2),
    SIZES,
)
@settings(max_examples=200, deadline=None)
def test_no_piece_shows_what_may_become_a_stop_string(letters, stops, sizes):
    """However the text goes on, what was shown stays: the longest end that begins a stop string is held back."""
    tokens = list("".join(letters).encode())
    output, shown, pushed = Output(plenty(stop=stops), (EOS,), byte_decode), "", 0
    for chunk in chunked(tokens, sizes):
        emitted = output.push(chunk)
        shown, pushed = shown + emitted.text, pushed + len(emitted.token_ids)
        if emitted.finish_reason is not None:
            break
        so_far = bytes(tokens[:pushed]).decode(errors="ignore")
        held = max(n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n]))
        assert shown == so_far[: len(so_far) - held] or len(so_far.encode()) < pushed
    assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_stop_string_at_every_place_of_a_committed_path(place, size):
    text = "abcdefgh"
    for length in (1, 2, 3):
        stop = text[place : place + length]
        said, ids, reason = answer(PATH, plenty(stop=stop), (size,))
        assert (said, reason) == (text[:place], "stop")
        assert ids == PATH[: place + len(stop)], "the tokens of the stop string are emitted, its text is not"


@pytest.mark.parametrize("end", [EOS, None])
@pytest.mark.parametrize("sizes", [(1,), (2, 3), (9,)])
def test_a_stop_string_that_is_the_end_of_the_text(end, sizes):
    tokens = list(b"done.END") + ([end] if end else [])
    params = SamplingParams(max_tokens=8, stop="END")
    assert answer(tokens, params, sizes) == ("done.", list(b"done.END"), "stop")


@pytest.mark.parametrize(("tokens", "reason"), [([*b"abEN", EOS], "stop"), (list(b"abEN"), "length")])
@pytest.mark.parametrize("sizes", [(1,), (3, 2), (9,)])
def test_what_was_held_back_comes_out_at_the_end(tokens, reason, sizes):
    params = SamplingParams(max_tokens=4 + (reason == "stop"), stop="END")
    assert answer(tokens, params, sizes) == ("abEN", tokens, reason)


def test_a_stop_string_inside_one_token():
    """A token of several characters is cut inside, at the first of several stop strings."""
    words = ["one ", "two STOP three", " four"]
    decode = lambda tokens: "".join(words[token] for token in tokens)  # noqa: E731
    for sizes in ((1,), (3,)):
        assert answer([0, 1, 2], plenty(stop=["three", "STOP"]), sizes, decode) == ("one two ", [0, 1], "stop")
        assert answer([0, 1, 2], plenty(stop=["e "]), sizes, decode) == ("on", [0], "stop")
        assert answer([0, 1, 2], plenty(stop=["three f"]), sizes, decode) == ("one two STOP ", [0, 1, 2], "stop")


def test_a_stop_string_may_be_an_end_token_too():
    """Whichever it is, the request stops once, at that token."""
    params = plenty(stop="C", stop_token_ids=[ord("C")])
    assert answer(list(b"ABCD"), params, (4,)) == ("AB", list(b"ABC"), "stop")


@pytest.mark.parametrize("end", [EOS, None])
def test_a_stop_string_before_a_character_that_is_never_finished(end):
    """A token of byte-level vocabularies may hold text and the first bytes of a character."""
    words = {0: b"a ", 1: b"END\xe2", EOS: b""}
    decode = lambda tokens: b"".join(words[token] for token in tokens).decode(errors="replace")  # noqa: E731
    params = SamplingParams(max_tokens=2 + (end is not None), stop="END")
    text, _, reason = answer([0, 1] + ([end] if end else []), params, (1,), decode)
    assert (text, reason) == ("a ", "stop")
