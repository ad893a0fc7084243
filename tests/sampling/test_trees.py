"""Trees of drafts: the path and the tokens of a walk that draws node after node."""

import jax
import numpy as np
import pytest

from jaxserve.sampling import make_state, verify_tree
from tests.support.sampling_runs import SLOTS, TOY, batch_of
from tests.support.verify_runs import one_by_one, run_verify, table_model

WIDTH = 8
ROWS = [
    {},
    {"position": 7, "slot": 1, "repetition_penalty": 1.7, "frequency_penalty": 0.9},
    {"temperature": 1.0, "seed": 5, "num_logprobs": 1, "suppress": [1, 2], "suppress_until": 2},
    {"temperature": 0.8, "seed": 6, "slot": 2, "presence_penalty": 2.0, "top_k": 5, "bias": {3: 2}},
]

_compiled = jax.jit(verify_tree, static_argnames="vocab_size")


def run_tree(drafts, parents, logits, *rows, state=None):
    drafts, parents = np.asarray(drafts, np.int32), np.asarray(parents, np.int32)
    results = _compiled(
        drafts,
        parents,
        np.asarray(logits, np.float32),
        # Positions behind the first are the function's own affair.
        batch_of(*[{"position": 0, **row} for row in rows], width=WIDTH),
        state or make_state(SLOTS, TOY),
        vocab_size=TOY,
    )
    return jax.tree.map(np.asarray, results)


def grow(truth, rng):
    """A random tree: drafts, parents and each node's text; true continuations are frequent."""
    drafts, parents, texts = [-1] * (WIDTH - 1), [-1] * WIDTH, [()]
    for node in range(1, rng.integers(1, WIDTH + 1)):
        parent = int(rng.integers(0, node))
        text = texts[parent]
        true = text == tuple(truth[: len(text)]) and rng.random() < 0.7
        token = truth[len(text)] if true else int(rng.integers(0, TOY))
        drafts[node - 1], parents[node] = token, parent
        texts.append((*text, token))
    return drafts, parents, texts


def walk(drafts, parents, truth):
    """The nodes whose texts are the truth, from the root on, the first of several."""
    path = [0]
    while True:
        named = [
            node
            for node in range(1, WIDTH)
            if parents[node] == path[-1] and drafts[node - 1] == truth[len(path) - 1]
        ]
        if not named:
            return path
        path.append(named[0])


def test_the_path_is_that_of_a_walk_and_the_tokens_those_of_single_steps():
    lengths = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        model = table_model(TOY, seed)
        state = make_state(SLOTS, TOY)
        truth, logprobs, _ = one_by_one(model, [WIDTH] * 4, *ROWS, state=state)
        trees = [grow(tokens, rng) for tokens in truth]
        logits = np.full((4, WIDTH, TOY), np.nan, np.float32)
        for row, (_, _, texts) in enumerate(trees):
            for node, text in enumerate(texts):
                logits[row, node] = model(row, text)
        drafts, parents, _ = zip(*trees, strict=True)
        output, path, after = run_tree(drafts, parents, logits, *ROWS, state=state)
        assert output.ok.all()
        paths = [walk(*tree[:2], tokens) for tree, tokens in zip(trees, truth, strict=True)]
        for row, nodes in enumerate(paths):
            count = len(nodes)
            assert path[row].tolist() == [*nodes, *[-1] * (WIDTH - count)]
            assert output.num_accepted[row] == count - 1
            assert output.tokens[row].tolist() == [*truth[row][:count], *[0] * (WIDTH - count)]
            lengths.add(count)
        for place in range(len(paths[2])):
            mine = jax.tree.map(lambda leaf, at=(2, place): leaf[at], output.logprobs)
            for left, right in zip(
                jax.tree.leaves(mine), jax.tree.leaves(logprobs[2][place]), strict=True
            ):
                np.testing.assert_array_equal(left, right)
        counted = one_by_one(model, [len(nodes) for nodes in paths], *ROWS, state=state)[2]
        np.testing.assert_array_equal(after.output_counts, counted.output_counts)
    assert lengths >= {1, 2, 3, 4, 5}


def test_a_chain_is_a_tree():
    model = table_model(TOY)
    truth, _, _ = one_by_one(model, [4] * 4, *ROWS, state=make_state(SLOTS, TOY))
    drafts = np.full((4, WIDTH - 1), -1, np.int32)
    logits = np.full((4, WIDTH, TOY), np.nan, np.float32)
    for row, tokens in enumerate(truth):
        drafts[row, :3] = tokens[:3]
        drafts[row, row:3] += row % 2  # the second row's second draft is wrong
        for place in range(4):
            logits[row, place] = model(row, tuple(drafts[row, :place].tolist()))
    parents = np.broadcast_to(np.arange(WIDTH) - 1, (4, WIDTH))
    tree, path, tree_state = run_tree(drafts, parents, logits, *ROWS)
    chain, chain_state = run_verify(drafts[:, :3], logits[:, :4], *ROWS)
    new = np.arange(4) <= chain.num_accepted[:, None]  # guesses stand behind them in a chain
    np.testing.assert_array_equal(tree.tokens[:, :4], np.where(new, chain.tokens, 0))
    np.testing.assert_array_equal(tree.num_accepted, chain.num_accepted)
    np.testing.assert_array_equal(tree_state.output_counts, chain_state.output_counts)
    assert chain.num_accepted.tolist() == [3, 1, 3, 3]
    assert path[0].tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_b34_a_node_without_numbers_fails_its_row_if_the_walk_comes_to_it(bad):
    logits = np.zeros((4, WIDTH, TOY), np.float32)
    logits[:, :, 7] = 9.0
    drafts = [[7, 8, 7, -1, -1, -1, -1]] * 4
    parents = [[-1, 0, 0, 1, -1, -1, -1, -1]] * 4
    broken = logits.copy()
    for row, node in enumerate((0, 1, 2, 3)):
        broken[row, node, 5] = bad
    rows = [{"slot": 1}, {"slot": 2}, {"slot": 3}, {"active": False}]
    output, path, state = run_tree(drafts, parents, broken, *rows)
    assert output.ok.tolist() == [False, False, True, True]
    assert output.num_accepted.tolist() == [0, 0, 2, 0]
    assert path[2].tolist() == [0, 1, 3, -1, -1, -1, -1, -1]
    assert (path[[0, 1, 3]] == -1).all()
    assert state.output_counts.sum(axis=1).tolist() == [0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize("parent", [-1, 2, 3, 40])
def test_nodes_without_a_place_in_the_tree_are_left_out(parent):
    logits = np.zeros((4, WIDTH, TOY), np.float32)
    logits[:, :, 7] = 9.0
    drafts = [[7, 7, -1, -1, -1, -1, -1]] * 4
    parents = [[-1, 0, parent, -1, -1, -1, -1, -1]] * 4
    output, path, _ = run_tree(drafts, parents, logits, {}, {}, {}, {})
    assert output.num_accepted.tolist() == [1] * 4
    assert path[0].tolist() == [0, 1, -1, -1, -1, -1, -1, -1]
