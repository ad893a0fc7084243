"""Training an EAGLE or EAGLE-3 draft: its sizes, what its words are, where it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_tools.chain_loss import ChainTask, Given, chain_loss, chain_scores
from checkpoints_tools.draft_vocabulary import coverage, frequent_words, to_published
from checkpoints_tools.fit import Learner
from checkpoints_tools.held_out import HeldOut, target_choices
from checkpoints_tools.published_layout import named_tensors
from checkpoints_tools.target_checkpoint import Target
from checkpoints_tools.target_states import TargetStates
from checkpoints_tools.training_text import Windows
from checkpoints_tools.warm_start import first_params
from checkpoints_tools.whole_sequences import sequence_ops
from jaxserve.errors import InvalidRequestError
from jaxserve.models.base import Config, Params
from jaxserve.models.drafts.base import FeatureDraft, target_sizes
from jaxserve.models.drafts.eagle import EAGLE
from jaxserve.models.drafts.eagle3 import EAGLE3

KINDS: Mapping[str, FeatureDraft] = {"eagle": EAGLE, "eagle3": EAGLE3}
_FROM_TARGET = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "bos_token_id", "eos_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class FeaturePlan:
    """A draft to be trained for a target. words: the target's ids that it can say, or None: all."""

    draft: FeatureDraft
    config: Config
    json_config: Mapping[str, Any]
    target: Target
    words: np.ndarray | None
    steps: int

    @property
    def tap_names(self) -> tuple[str, ...]:
        return self.draft.tap_names(self.config)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {**self.json_config, "guesses": self.steps}

    def about(self, text: Windows) -> str:
        """What a user should know before it starts."""
        if self.words is None:
            return f"{self.draft.name}: the target's vocabulary of {self._vocab_size} words"
        share = 100 * coverage(text, self.words)
        return (
            f"{self.draft.name}: {len(self.words)} of the target's {self._vocab_size} words, "
            f"{share:.1f} % of the held-out tokens; all others are never drafted"
        )

    @property
    def _vocab_size(self) -> int:
        size: int = self.target.model.config.vocab_size
        return size

    def first(self, seed: int) -> Params:
        """The params that training changes."""
        params = first_params(self.draft, self.config, self.target.model, self.words, seed)
        return {name: value for name, value in params.items() if name != "d2t"}

    def learner(self, held_out: TargetStates, batch: int) -> Learner:
        """What `fit` needs."""
        model = self.target.model
        ops = sequence_ops(self.draft.kv_spec(self.config), held_out.windows.tokens.shape[1])
        task = ChainTask(self.draft, self.config, model.model, model.config, ops, self.steps)
        given = self._given()
        choices = target_choices(model, ops, held_out)
        score = HeldOut(partial(chain_scores, task), given, held_out, choices, batch)
        return Learner(partial(chain_loss, task), given, score)

    def _given(self) -> Given:
        params, words = self.target.model.params, self.words
        unembedding = "unembed" if "unembed" in params else "embed"
        table = params[unembedding]
        fixed = {}
        if words is not None:
            table = jnp.take(table, words, axis=0)
            fixed = {"d2t": jnp.asarray(words - np.arange(len(words)), jnp.int32)}
        return Given(params["embed"], {unembedding: table}, fixed)

    def tensors(self, params: Params, tap_scale: np.ndarray) -> dict[str, np.ndarray]:
        """The trained draft as published checkpoints hold it."""
        if self.tap_names:  # it has learnt from taps that were divided by this
            params = {**params, "fc": params["fc"] / tap_scale}
        tensors = named_tensors(self.draft, self.config, params, self.config.layer)
        if self.words is not None:
            tensors["d2t"], tensors["t2d"] = to_published(self.words, self._vocab_size)
        return tensors


def plan_features(
    kind: str, target: Target, text: Windows, *, vocabulary: int, steps: int
) -> FeaturePlan:
    """vocabulary: words of an EAGLE-3 draft. steps: guesses in a row that it is trained for.

    Raises InvalidRequestError for a target whose params have no table "embed" to read words from.
    """
    model = target.model
    if "embed" not in model.params:
        raise InvalidRequestError(
            f"{target.name}: its params have no table 'embed', which {kind} reads; train a medusa "
            "draft, or distil one"
        )
    sizes = target_sizes(model.config)
    config: dict[str, Any] = {
        key: target.json_config[key] for key in _FROM_TARGET if key in target.json_config
    }
    config |= {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
    config |= {"bias": False, "tie_word_embeddings": False, "torch_dtype": "float32"}
    words = None
    if kind == "eagle3":
        words = frequent_words(text, min(vocabulary, sizes.vocab_size), sizes.vocab_size)
        config |= {"draft_vocab_size": len(words)}
    config["architectures"] = ["LlamaForCausalLM" + ("Eagle3" if words is not None else "Eagle")]
    draft = KINDS[kind]
    return FeaturePlan(draft, draft.config_from_hf(config, sizes), config, target, words, steps)
