"""Windows score every token once, each with enough in front of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.eval.text_windows import Window, text_windows

BOS = 1000


@given(
    length=st.integers(2, 90),
    context=st.integers(2, 40),
    stride=st.integers(1, 39),
    has_bos=st.booleans(),
)
def test_every_token_is_scored_once_with_the_promised_context(length, context, stride, has_bos):
    stride = min(stride, context - 1)
    prefix = (BOS,) if has_bos else ()
    windows = text_windows(range(length), prefix, context=context, stride=stride)
    scored = [token for window in windows for token in window.token_ids[window.first :]]
    assert scored == list(range(0 if has_bos else 1, length))
    for index, window in enumerate(windows):
        assert len(window.token_ids) <= context
        assert window.num_scored >= 1
        assert window.token_ids[: len(prefix)] == prefix
        assert window.first >= (1 if index == 0 else context - stride)
        own = window.token_ids[len(prefix) :]
        assert list(own) == list(range(own[0], own[0] + len(own))), "a window is a piece of text"


def test_windows_by_hand():
    assert text_windows([5, 6, 7, 8, 9], (), context=3, stride=2) == [
        Window((5, 6, 7), 1),
        Window((7, 8, 9), 1),
    ]
    assert text_windows([5, 6, 7], (BOS,), context=3, stride=1) == [
        Window((BOS, 5, 6), 1),
        Window((BOS, 6, 7), 2),
    ]
    assert text_windows([5], (BOS,), context=8, stride=4) == [Window((BOS, 5), 1)]


@pytest.mark.parametrize(
    ("length", "prefix", "context", "stride", "reason"),
    [
        (1, (), 8, 4, "the text has 1 tokens; perplexity needs at least 2"),
        (0, (BOS,), 8, 4, "the text has 0 tokens; perplexity needs at least 1"),
        (9, (), 1, 1, "context is 1; give at least 2"),
        (9, (BOS,), 1, 1, "context is 1; give at least 2"),
        (9, (), 8, 8, "stride is 8; give 1 to 7"),
        (9, (BOS,), 8, 8, "stride is 8; give 1 to 7"),
        (9, (), 8, 0, "stride is 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(length, prefix, context, stride, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        text_windows(range(length), prefix, context=context, stride=stride)
