"""TextStream against plain str.find on the text of all tokens, for random ids, stops and chunks."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.outputs import OutputDelta
from jaxserve.engine.request import TokenEvent, TokenLogprobs
from jaxserve.engine.text_stream import TextStream
from jaxserve.sampling_params import SamplingParams
from tests.support.fake_tokenizer import FakeTokenizer

EOS = 0
E_ACUTE, GRIN = "é".encode(), "😀".encode()
# Overlapping letters, characters cut between tokens, an empty token, a hidden special token.
PIECES = [
    "</s>",
    "a",
    "ab",
    "b",
    "aab",
    "\n",
    "",
    E_ACUTE[:1],
    E_ACUTE[1:],
    GRIN[:2],
    GRIN[2:],
    "<x>",
]
TOKENIZER = FakeTokenizer(PIECES, special=[EOS, PIECES.index("<x>")])

IDS = st.lists(st.integers(1, len(PIECES) - 1), max_size=14)
STOPS = st.lists(st.text("ab\né😀\ufffd<x>", min_size=1, max_size=4), max_size=3)


def events(
    ids: list[int], cuts: set[int], reason: str | None, stop_reason: int | None = None
) -> list[TokenEvent]:
    """The ids as TokenEvents cut at the positions `cuts`; the last one carries the reason."""
    bounds = [0, *sorted(c for c in cuts if 0 < c < len(ids)), len(ids)]
    chunks = [tuple(ids[i:j]) for i, j in itertools.pairwise(bounds)]
    logprobs = [tuple(TokenLogprobs(-0.25 * t, 1, ()) for t in chunk) for chunk in chunks]
    made = [TokenEvent("r-0", c, lp) for c, lp in zip(chunks[:-1], logprobs, strict=False)]
    return [*made, TokenEvent("r-0", chunks[-1], logprobs[-1], reason, stop_reason)]


def run(stream: TextStream, all_events: list[TokenEvent]) -> list[OutputDelta]:
    deltas = []
    for event in all_events:
        if not stream.finished:
            deltas.append(stream.push(event))
    return deltas


def joined(deltas: list[OutputDelta]) -> tuple:
    return (
        "".join(d.text for d in deltas),
        tuple(i for d in deltas for i in d.token_ids),
        [lp for d in deltas for lp in d.logprobs or ()],
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )


def text_up_to(ids: list[int], count: int, params: SamplingParams, final: bool) -> str:
    """Text the first `count` tokens complete: open characters only if nothing follows."""
    detokenizer = TOKENIZER.detokenizer((), params.skip_special_tokens)
    text = detokenizer.push(ids[:count])
    return text + detokenizer.finish() if final else text


def expected(ids: list[int], params: SamplingParams, reason: str) -> tuple:
    """The whole output at once: (text, ids, finish_reason, stop_reason)."""
    silent = reason == "stop" and not params.include_stop_str_in_output
    spoken = ids[:-1] if silent else ids
    text = text_up_to(spoken, len(spoken), params, final=True)
    minimum = len(text_up_to(spoken, min(params.min_tokens, len(spoken)), params, final=False))
    if len(ids) <= params.min_tokens:
        minimum = len(text)
    found = []
    for stop in params.stop_strings:
        start = text.find(stop, max(0, minimum - len(stop) + 1))
        if start >= 0:
            found.append((start, start + len(stop), stop))
    if not found:
        return text, tuple(ids), reason, None
    start, end, stop = min(found)
    kept = next(
        (n for n in range(1, len(spoken) + 1) if len(text_up_to(spoken, n, params, False)) >= end),
        len(ids),
    )
    shown = text[:end] if params.include_stop_str_in_output else text[:start]
    return shown, tuple(ids[:kept]), "stop", stop


@settings(deadline=None)
@given(
    ids=IDS,
    stops=STOPS,
    cuts=st.sets(st.integers(1, 14)),
    reason=st.sampled_from(["stop", "length", "abort", "error"]),
    include=st.booleans(),
    skip_special=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_b03_joined_deltas_equal_the_whole(
    ids, stops, cuts, reason, include, skip_special, min_tokens
):
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=include,
        skip_special_tokens=skip_special,
        min_tokens=min_tokens,
        logprobs=0,
    )
    ids = [*ids, EOS] if reason == "stop" else ids
    deltas = run(TextStream(TOKENIZER, (), params, "r", 0), events(ids, cuts, reason))
    text, token_ids, logprobs, finish_reason, stop_reason = joined(deltas)
    assert (text, token_ids, finish_reason, stop_reason) == expected(ids, params, reason)
    assert [next(iter(entries)) for entries in logprobs] == list(token_ids)
    assert all(d.finish_reason is None for d in deltas[:-1])


@settings(deadline=None)
@given(ids=IDS, stops=STOPS, cuts=st.sets(st.integers(1, 14)))
def test_nothing_published_is_ever_taken_back(ids, stops, cuts):
    """Whatever comes next, what was published is a prefix of the result, text and ids alike."""
    params = SamplingParams(stop=stops)
    stream = TextStream(TOKENIZER, (), params)
    text, published, seen = "", (), []
    for event in events(ids, cuts, None):
        delta = stream.push(event)
        seen += event.token_ids
        text += delta.text
        published += delta.token_ids
        if stream.finished:
            return
        for ending in ([], ids, [1, 3, 5], [8, 10, 3]):
            whole, whole_ids, _, _ = expected(seen + ending, params, "length")
            assert whole.startswith(text)
            assert whole_ids[: len(published)] == published


CASES = [  # FAKE pieces, stops, text, number of ids
    (["A", "lice", "!", "\n", "x"], ["\n", "Alice:"], "Alice!", 4),
    (["why", "?\n", "x"], ["\n"], "why?", 2),
    (["O", " P", " Q", "x"], ["O P Q"], "", 3),
    (["\n", "x"], ["\n"], "", 1),
    (["xEND", "y"], ["END"], "x", 1),
    (["a", "b", "c", "d", "e"], ["cd", "bcde"], "a", 5),  # the earlier beginning wins
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 10])
@pytest.mark.parametrize(("pieces", "stops", "text", "num_ids"), CASES)
def test_b03_stop_string_over_token_edges(pieces, stops, text, num_ids, chunk, include):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    stream = TextStream(FakeTokenizer(pieces), (), params)
    ids = list(range(len(pieces)))
    deltas = run(stream, events(ids, set(range(chunk, len(ids), chunk)), "length"))
    got, got_ids, _, reason, stop = joined(deltas)
    assert (got, len(got_ids), reason) == (text + stop if include else text, num_ids, "stop")
    assert stop in stops
    assert stream.num_tokens == num_ids


def test_only_what_could_become_a_stop_is_held_back():
    stream = TextStream(
        FakeTokenizer(["Al", "ice", " x", "Alice"]), (), SamplingParams(stop="Alice:")
    )
    assert stream.push(TokenEvent("r-0", (0,), None)).text == ""
    assert stream.push(TokenEvent("r-0", (1,), None)).text == ""
    assert stream.push(TokenEvent("r-0", (2,), None)).text == "Alice x"
    last = stream.push(TokenEvent("r-0", (3,), None, "length"))
    assert (last.text, last.finish_reason, last.stop_reason) == ("Alice", "length", None)


def test_ids_after_a_complete_match_wait_for_the_decision():
    stream = TextStream(FakeTokenizer(list("abcdeX")), (), SamplingParams(stop=["cd", "bcdef"]))
    got = [stream.push(TokenEvent("r-0", (i,), None)) for i in range(5)]
    assert [d.token_ids for d in got] == [(0,), (1,), (2,), (3,), ()]
    assert [d.text for d in got] == ["a", "", "", "", ""]
    last = stream.push(TokenEvent("r-0", (5,), None))
    assert (last.text, last.token_ids, last.stop_reason) == ("b", (), "cd")
    assert stream.num_tokens == 4


def test_stop_token_is_an_id_but_not_text():
    tokenizer = FakeTokenizer(["</s>", "a", "|end|"], special=[0])
    for params, last, reason, text in [
        (SamplingParams(), 0, None, "a"),
        (SamplingParams(skip_special_tokens=False), 0, None, "a"),
        (SamplingParams(stop_token_ids=[2]), 2, 2, "a"),
        (SamplingParams(stop_token_ids=[2], include_stop_str_in_output=True), 2, 2, "a|end|"),
        (SamplingParams(include_stop_str_in_output=True), 0, None, "a"),
    ]:
        (delta,) = run(TextStream(tokenizer, (), params), events([1, last], set(), "stop", reason))
        assert (delta.text, delta.token_ids) == (text, (1, last))
        assert (delta.finish_reason, delta.stop_reason) == ("stop", reason)


def test_stop_strings_count_after_min_tokens():
    tokenizer = FakeTokenizer(["a", "b"])
    for min_tokens, num_ids in [(0, 2), (1, 2), (2, 4), (3, 4), (4, 6)]:
        stream = TextStream(tokenizer, (), SamplingParams(stop="b", min_tokens=min_tokens))
        deltas = run(stream, events([0, 1] * 3, {1, 2, 3, 4, 5}, "length"))
        assert len(joined(deltas)[1]) == num_ids, min_tokens


def test_half_a_character_waits_and_is_never_lost():
    stream = TextStream(TOKENIZER, (), SamplingParams())
    first, rest = PIECES.index(GRIN[:2]), PIECES.index(GRIN[2:])
    assert stream.push(TokenEvent("r-0", (first,), None)).text == ""
    assert stream.push(TokenEvent("r-0", (rest,), None)).text == "😀"
    assert stream.push(TokenEvent("r-0", (first,), None, "length")).text == "\ufffd"


def test_logprobs_have_the_token_first_and_no_repeats():
    tokenizer = FakeTokenizer(["x", "é", b"\xc3"])
    raw = TokenLogprobs(-1.5, 2, ((0, -0.5), (1, -1.5), (2, -math.inf)))
    stream = TextStream(tokenizer, (), SamplingParams(logprobs=3))
    delta = stream.push(TokenEvent("r-0", (1,), (raw,), num_cached_tokens=5))
    (entries,) = delta.logprobs
    assert [(i, e.logprob, e.rank, e.decoded_token) for i, e in entries.items()] == [
        (1, -1.5, 2, "é"),
        (0, -0.5, 1, "x"),
        (2, -math.inf, 3, "\ufffd"),
    ]
    assert delta.num_cached_tokens == 5
    end = stream.push(TokenEvent("r-0", (), None, "abort"))
    assert (end.logprobs, end.finish_reason) == ((), "abort")


def test_no_logprobs_unless_asked():
    stream = TextStream(FakeTokenizer(["x"]), (), SamplingParams())
    assert stream.push(TokenEvent("r-0", (0,), None, "length")).logprobs is None


def test_error_text_is_passed_on():
    stream = TextStream(FakeTokenizer(["x"]), (), SamplingParams(), "q", 3)
    delta = stream.push(TokenEvent("q-3", (), None, "error", error="NaN logits"))
    assert (delta.request_id, delta.index, delta.error) == ("q", 3, "NaN logits")
