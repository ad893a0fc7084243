"""From a text file to windows: nothing lost, nothing mixed up, a part held out."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints_tools.draft_vocabulary import coverage, frequent_words, to_published
from checkpoints_tools.training_text import PADDING, Windows, pack, read_training_text
from jaxserve.errors import InvalidRequestError
from tests.support.tiny_engine import tiny_model

DOCUMENTS = st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=60), max_size=12)


def pieces_of(windows: Windows) -> list[list[int]]:
    """The documents' pieces as the windows hold them."""
    found = []
    for tokens, rows, positions in zip(
        windows.tokens, windows.rows, windows.positions, strict=True
    ):
        for row in range(rows.max(initial=PADDING) + 1):
            own = np.flatnonzero(rows == row)
            assert (np.diff(own) == 1).all(), "a document's tokens lie side by side"
            np.testing.assert_array_equal(positions[own], np.arange(len(own)))
            found.append(tokens[own].tolist())
    return found


@given(DOCUMENTS, st.integers(4, 40))
def test_packing_keeps_every_document_in_order(documents: list[list[int]], length: int) -> None:
    windows = pack(documents, length)
    assert windows.tokens.shape == windows.rows.shape == (len(windows), length)
    want = [d[i : i + length] for d in documents for i in range(0, len(d), length)]
    want = [piece for piece in want if len(piece) >= 4]  # shorter ones teach nothing
    assert pieces_of(windows) == want
    assert windows.num_tokens == sum(map(len, want))
    assert len(windows) <= len(want)


def test_a_part_of_the_documents_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\f".join(f"document {index:02}." for index in range(40)))
    text = read_training_text(path, tiny_model(), 32, 0.1)
    kept = {bytes(piece[1:]).decode() for piece in pieces_of(text.train)}  # behind the BOS
    apart = {bytes(piece[1:]).decode() for piece in pieces_of(text.held_out)}
    assert apart == {f"document {index}." for index in ("09", "19", "29", "39")}
    assert len(kept) == 36
    assert not kept & apart
    again = read_training_text(path, tiny_model(), 32, 0.1)
    assert again.train.fingerprint() == text.train.fingerprint() != text.held_out.fingerprint()


def test_one_long_text_is_cut_and_lines_of_endoftext_separate_documents(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a long text without end " * 40)
    text = read_training_text(path, tiny_model(), 32, 0.2)
    assert (len(text.train), len(text.held_out)) == (24, 6)
    path.write_text("\n<|endoftext|>\n".join(f"number {index}" for index in range(10)))
    pieces = pieces_of(read_training_text(path, tiny_model(), 32, 0.5).train)
    assert [bytes(piece[1:]).decode() for piece in pieces] == [
        f"number {i}" for i in range(0, 10, 2)
    ]


def test_first_tokens_only(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\f".join("abcdefg" for _ in range(40)))
    text = read_training_text(path, tiny_model(), 8, 0.1, max_tokens=160)
    assert text.train.num_tokens + text.held_out.num_tokens == 160


def test_a_window_is_no_longer_than_the_models_context(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match="windows of 257 tokens; this model holds at most"
    ):
        read_training_text(tmp_path / "text.txt", tiny_model(), 257, 0.1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tiny text", r"has 10 tokens; want at least 10 windows of 32, or as many documents"),
        ("", "is empty"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_what_cannot_be_learnt_from(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidRequestError, match=message):
        read_training_text(path, tiny_model(), 32, 0.1)


def test_words_of_a_draft() -> None:
    """What the text uses is in; then ids count by their order. The published map says which."""
    windows = pack([[500] * 200 + [700] * 150 + [3] * 5], 400)
    words = frequent_words(windows, 16, 1000)
    assert words.dtype == np.int32
    assert (np.diff(words) > 0).all()
    assert {500, 700, 3} <= set(words.tolist())
    assert set(words.tolist()) - {500, 700} <= set(range(20))
    assert coverage(windows, words) == 1
    assert coverage(windows, np.array([500])) == pytest.approx(200 / 355)
    d2t, t2d = to_published(words, 1000)
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(np.arange(16) + d2t, words)
    np.testing.assert_array_equal(np.flatnonzero(t2d), words)
