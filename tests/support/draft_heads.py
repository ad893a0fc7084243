"""Heads for a tiny target whose texts follow a rule, some that know it, and the drafts they owe.

The target's next token depends on its last one alone, sharply: word i is followed by word 7 i + 3.
So heads can be written down that are always right. Heads that can say only some words, or are
noisy, are right sometimes.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_tools.whole_sequences import no_keys, sequence_batch, sequence_ops
from jaxserve.loading.drafts import LoadedDraft
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.base import layer_input
from jaxserve.models.drafts import medusa
from jaxserve.models.drafts.base import FeatureDraft, target_sizes
from jaxserve.models.drafts.eagle import EAGLE
from jaxserve.models.drafts.eagle3 import EAGLE3
from jaxserve.models.drafts.medusa import MEDUSA
from jaxserve.models.drafts.mtp import MTP
from tests.support.paged_model import random_params
from tests.support.tiny_engine import tiny_config, tiny_model

METHODS = ("eagle", "eagle3", "mtp", "medusa")
LAYERS, HEADS = 4, 3
LONGEST = 96  # tokens of a sequence that is checked
TAPPED = (0, 2, 3)  # layers whose inputs EAGLE-3 reads
_DRAFTS: dict[str, FeatureDraft] = {"eagle": EAGLE, "eagle3": EAGLE3, "mtp": MTP}
_SIZE = 32


@cache
def target() -> LoadedModel:
    """Damped layers between embeddings and an unembedding that maps word i to word 7 i + 3."""
    model = tiny_model(num_hidden_layers=LAYERS)
    params = dict(model.params)
    params["layers"] = [
        {**layer, "attention_out": layer["attention_out"] * 0.1, "down": layer["down"] * 0.1}
        for layer in params["layers"]
    ]
    params["unembed"] = jnp.asarray(_successor_table(params["embed"], 1))
    return LoadedModel(**{**vars(model), "params": params})


def _successor_table(embed: Any, ahead: int) -> np.ndarray:
    """An unembedding for which a word's embedding says the word `ahead` places later."""
    table = np.array(embed, np.float32)
    words = np.arange(len(table))
    said = words
    for _ in range(ahead):
        said = (7 * said + 3) % len(table)
    result = np.zeros_like(table)
    result[said] = 6 * table
    return result


def heads(method: str, *, noise: float = 0.0, words: int | None = None) -> LoadedDraft:
    """Heads that are right. noise: how wrong their weights are instead. words: of the target's that
    EAGLE-3 can say; None: all."""
    model, sizes = target(), target_sizes(target().config)
    draft: Any
    if method == "medusa":
        config = medusa.config_from_hf({"medusa_num_heads": HEADS, "medusa_num_layers": 1}, sizes)
        draft = MEDUSA
    else:
        draft = _DRAFTS[method]
        config = draft.config_from_hf(_json_config(words or sizes.vocab_size), sizes)
    drawn = random_params(draft, config)
    params = jax.tree.map(lambda leaf: np.float32(noise) * leaf, drawn)
    {"eagle": _eagle, "eagle3": _eagle3, "mtp": _mtp, "medusa": _medusa}[method](
        params, model.params["embed"]
    )
    params = jax.tree.map(jnp.asarray, params)
    return LoadedDraft(method, draft, config, params, words or sizes.vocab_size)


def _json_config(words: int) -> dict[str, Any]:
    return tiny_config(
        num_hidden_layers=1,
        num_key_value_heads=4,
        num_nextn_predict_layers=1,
        draft_vocab_size=words,
        eagle_aux_hidden_state_layer_ids=list(TAPPED),
        bias=True,
        head_dim=_SIZE // 4,
    )


def _eagle(params: Any, embed: Any) -> None:
    """The next feature is the token's embedding."""
    del embed
    params["fc"] = params["fc"] + np.eye(_SIZE, 2 * _SIZE, dtype=np.float32)
    params["layers"][0]["mlp_norm"] = np.ones(_SIZE, np.float32)


def _mtp(params: Any, embed: Any) -> None:
    """The same, normed."""
    del embed
    params["join"] = params["join"] + np.eye(_SIZE, 2 * _SIZE, dtype=np.float32)
    norms = ("embedding_norm", "feature_norm", "attention_norm", "final_norm")
    for tree, names in ((params, norms), (params["layer"], ("mlp_norm",))):
        for name in names:
            tree[name] = np.ones(_SIZE, np.float32)


def _eagle3(params: Any, embed: Any) -> None:
    """Attention, which looks at its own token, swaps the feature for the token's embedding: so the
    feature is that embedding, and normed as it is."""
    layer = params["layer"]
    for tree, name in (
        (layer, "embedding_norm"),
        (layer, "feature_norm"),
        (layer, "mlp_norm"),
        (params, "final_norm"),
    ):
        tree[name] = np.ones(_SIZE, np.float32)
    one, none = np.eye(_SIZE, dtype=np.float32), np.zeros((_SIZE, _SIZE), np.float32)
    sharp, swap = np.hstack([3 * one, none]), np.hstack([one, -one])
    layer["qkv"] = layer["qkv"] + np.concatenate([sharp, sharp, swap])
    layer["attention_out"] = layer["attention_out"] + one
    words = len(params["d2t"])
    vocabulary = len(embed)
    said = np.arange(words) * vocabulary // words  # spread over the vocabulary
    params["d2t"] = (said - np.arange(words)).astype(np.int32)
    params["unembed"] = params["unembed"] + _successor_table(embed, 1)[said]


def _medusa(params: Any, embed: Any) -> None:
    """Head h reads the token before the last and says the one h + 2 places later."""
    for index, head in enumerate(params["heads"]):
        head["unembed"] = head["unembed"] + _successor_table(embed, index + 2)


class Owed:
    """What heads owe for some known tokens: computed over whole sequences, without any cache."""

    def __init__(self, draft: LoadedDraft) -> None:
        self.draft = draft
        self._next = jax.jit(self._next_feature)
        self._score = jax.jit(self._logits)

    def check(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Raise AssertionError unless every draft is the likeliest, given those before it."""
        for index, (draft, logits) in enumerate(
            zip(drafts, self._chain(tokens, drafts), strict=True)
        ):
            best = logits.max()
            assert logits[draft] > best - 1e-3 * max(1.0, abs(best)), (
                f"draft {index} after {len(tokens)} tokens is {draft}, want {logits.argmax()}"
            )

    def _chain(self, tokens: Sequence[int], drafts: Sequence[int]) -> Iterator[np.ndarray]:
        """Logits [V] of each draft, as those before it are."""
        known = len(tokens) - 1
        hidden, taps = _target_states(_padded(tokens))
        if self.draft.name == "medusa":
            scores = self._score(hidden[known - 1 : known])
            yield from np.asarray(scores[: len(drafts), 0])
            return
        kind: Any = self.draft.draft
        captured = taps if self.draft.name == "eagle3" else hidden
        ops = sequence_ops(kind.kv_spec(self.draft.config), LONGEST)
        features = np.array(kind.fuse(self.draft.config, self.draft.params, captured, ops))
        text = _padded([*tokens[1:], *drafts])
        for pairs in range(known, known + len(drafts)):
            features[pairs] = self._next(text, features, pairs)
            yield np.asarray(self._score(features[pairs : pairs + 1])[0])

    def _next_feature(self, text: jax.Array, features: jax.Array, pairs: int) -> jax.Array:
        """The feature [E] that the last of so many pairs gives."""
        kind: Any = self.draft.draft
        config, params = self.draft.config, self.draft.params
        ops = sequence_ops(kind.kv_spec(config), LONGEST)
        embeddings = jnp.asarray(target().params["embed"])[text]
        out, _ = kind.forward(config, params, embeddings, features, _batch(text), no_keys(), ops)
        return out[pairs - 1]

    def _logits(self, features: jax.Array) -> jax.Array:
        """[1, V] of a feature [1, E]; of Medusa's heads [heads, 1, V]."""
        kind: Any = self.draft.draft
        config, params, model = self.draft.config, self.draft.params, target()
        ops = sequence_ops(model.model.kv_spec(model.config), LONGEST)

        def unembed(hidden: jax.Array) -> jax.Array:
            return model.model.unembed(model.config, model.params, hidden, ops)

        if self.draft.name == "medusa":
            return medusa.heads(config, params, features, unembed, ops)
        logits = kind.logits(config, params, features, unembed, ops)
        ids = kind.target_ids(config, params, jnp.arange(logits.shape[1]))
        return jnp.full((1, model.vocab_size), -jnp.inf).at[:, ids].set(logits)


def _padded(tokens: Sequence[int]) -> np.ndarray:
    """As long as every other sequence, so that everything compiles once; what comes later changes
    nothing that is read."""
    assert len(tokens) <= LONGEST
    return np.pad(np.array(tokens, np.int32), (0, LONGEST - len(tokens)))


def _batch(tokens: jax.Array) -> Any:
    places = np.arange(LONGEST, dtype=np.int32)[None]
    return sequence_batch(tokens[None], np.zeros_like(places), places)


@jax.jit
def _target_states(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The target's last hidden states [T, E], and the taps that EAGLE-3 reads, joined."""
    model = target()
    ops = sequence_ops(model.model.kv_spec(model.config), LONGEST)
    hidden, taps, _ = model.model.forward(
        model.config, model.params, _batch(tokens), no_keys(), ops
    )
    return hidden, jnp.concatenate([taps[layer_input(index)] for index in TAPPED], axis=1)
