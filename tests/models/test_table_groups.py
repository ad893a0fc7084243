"""Windowed and global layers under page tables of their own: other pages, the same numbers."""

from functools import cache

import jax
import numpy as np
import pytest

from jaxserve.core.kv_layout import KVLayout, kv_layout, single_table
from jaxserve.models.gemma3 import MODEL, config_from_hf
from tests.support.paged_model import PagedModel, PagedSequence, random_params

WINDOW, PAGE_SIZE = 10, 4
CONFIG = config_from_hf(
    {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,  # layers 2 and 5 see everything
        "max_position_embeddings": 128,
        "hidden_activation": "gelu_pytorch_tanh",
    }
)
SPEC = MODEL.kv_spec(CONFIG)
TOKENS = np.random.default_rng(3).integers(0, 60, 61).tolist()
CHUNKS = (17, 5, 18, 1, 1, 16, 1, 1, 1)  # of TOKENS; chunks of 1 decode


def test_the_layout() -> None:
    layout = kv_layout(SPEC)
    assert [table.layers for table in layout.tables] == [(0, 1), (3, 4), (2, 5)]
    assert layout.windows == (WINDOW, WINDOW, None)


@cache
def params() -> object:
    return random_params(MODEL, CONFIG)


def paged(layout: KVLayout, backend: str) -> PagedModel:
    return PagedModel(
        MODEL, CONFIG, params(), layout=layout, backend=backend, page_size=PAGE_SIZE, num_pages=20,
        pages_per_row=16,
    )  # fmt: skip


def run(model: PagedModel, tables: list[list[int]], *, give_back: bool) -> np.ndarray:
    """Logits of TOKENS, chunk by chunk. give_back: pages out of the window leave their list and are
    filled with NaN, as if whoever has them now had failed."""
    sequence = PagedSequence(tables=tables)
    logits = []
    at = 0
    for size in CHUNKS:
        tokens = TOKENS[at : at + size]
        if size == 1:
            logits += model.step(decode=[(sequence, tokens[0])])
        else:
            logits += model.step(prefill=[(sequence, tokens)], pad_tokens=3)
        at += size
        if give_back:
            leaving = forget(tables, at)
            model.pool = jax.tree.map(
                lambda leaf, pages=leaving: leaf.at[pages].set(np.nan), model.pool
            )
    assert at == len(TOKENS)
    return np.concatenate(logits)


def forget(tables: list[list[int]], num_computed: int) -> np.ndarray:
    """Put 0 for the pages of windowed groups that no query from num_computed on sees."""
    leaving = []
    for pages, window in zip(tables, kv_layout(SPEC).windows, strict=True):
        if window is not None:
            first = max(0, num_computed - window + 1) // PAGE_SIZE
            leaving += [page for page in pages[:first] if page]
            pages[:first] = [0] * first
    return np.array(leaving, np.int32)


@cache
def of_one_table(backend: str) -> np.ndarray:
    return run(paged(single_table(SPEC), backend), [list(range(1, 17))], give_back=False)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("give_back", [False, True])
def test_groups_of_tables_give_the_numbers_of_one(backend: str, give_back: bool) -> None:
    """Other ids in each group, in any order, and pages given back that hold NaN: no bit changes."""
    ids = np.random.default_rng(7).permutation(np.arange(1, 60))[:48].reshape(3, 16)
    model = paged(kv_layout(SPEC), backend)
    tables = ids.tolist()
    logits = run(model, tables, give_back=give_back)
    np.testing.assert_array_equal(logits, of_one_table(backend))
    if give_back:
        assert [sum(page == 0 for page in pages) for pages in tables] == [13, 13, 0]


def test_a_page_of_the_window_is_read() -> None:
    """The test above would see a page that is given back too early."""
    model = paged(kv_layout(SPEC), "cpu")
    tables = np.arange(1, 49).reshape(3, 16).tolist()
    sequence = PagedSequence(tables=tables)
    model.step(prefill=[(sequence, TOKENS[:40])])
    for pages in tables[:2]:
        pages[8] = 0  # tokens 32 to 35; the next query sees 31 to 40
    assert np.isnan(model.step(decode=[(sequence, TOKENS[40])])[0]).all()


def test_two_requests_share_the_arrays_without_meeting() -> None:
    """Pages of one group and request are another's in the next: arrays are shared, slots not."""
    model = paged(kv_layout(SPEC), "cpu")
    ids = np.random.default_rng(8).permutation(np.arange(1, 60))
    first = PagedSequence(tables=ids[:24].reshape(3, 8).tolist())
    second = PagedSequence(tables=ids[24:48].reshape(3, 8).tolist())
    got = model.step(prefill=[(first, TOKENS[:29]), (second, TOKENS[31:])])
    more = model.step(decode=[(second, 7), (first, 9)])
    for logits, decoded, prompt, token in (
        (got[0], more[1], TOKENS[:29], 9), (got[1], more[0], TOKENS[31:], 7),
    ):  # fmt: skip
        alone = paged(single_table(SPEC), "cpu")
        own = PagedSequence(pages=range(1, 17))
        np.testing.assert_array_equal(logits, alone.step(prefill=[(own, prompt)])[0])
        np.testing.assert_array_equal(decoded, alone.step(decode=[(own, token), None])[0])
