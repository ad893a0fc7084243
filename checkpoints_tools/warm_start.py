"""First weights of a draft: random, or the target's own where these have a place in it.

An EAGLE layer begins as the target's last layer, and an EAGLE-3 unembedding as the target's rows:
the features it reads are the target's, so their directions mean something from the first step.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.base import Config, Params
from jaxserve.models.drafts.base import FeatureDraft

_SAME_PLACE = ("attention_out", "mlp_norm", "gate_up", "down")


def first_params(
    draft: FeatureDraft, config: Config, target: LoadedModel, words: np.ndarray | None, seed: int
) -> Params:
    """Float32 params of the draft. words: the target's ids that an EAGLE-3 draft can say."""
    params = random_params(draft, config, seed, "float32")
    E = target.config.hidden_size
    own = params["layer"] if "layer" in params else params["layers"][0]
    layers = _layers(target.params)
    if layers:
        for name in _SAME_PLACE:
            if _fits(layers[-1].get(name), own.get(name)):
                own[name] = layers[-1][name]
        if own["qkv"].shape[0] == layers[-1]["qkv"].shape[0]:
            own["qkv"] = _queries(own["qkv"], layers)
    if draft.name == "eagle3":
        _start_eagle3(params, target.params, words, E, layers)
    else:
        params["fc"] = params["fc"].at[:, E:].add(jnp.eye(E))
    return params


def _layers(params: Params) -> list[Any]:
    """The target's layers, if it is built like the drafts' own."""
    layers = params.get("layers", []) if isinstance(params, dict) else []
    return [layer for layer in layers if "qkv" in layer and "attention_norm" in layer]


def _fits(source: Any, place: Any) -> bool:
    return source is not None and place is not None and source.shape == place.shape


def _queries(own: Any, layers: list[Any]) -> Any:
    """qkv of a draft's layer: features as the last layer reads them, embeddings as the first."""
    E = layers[-1]["qkv"].shape[1]
    if own.shape[1] == E:
        return layers[-1]["qkv"] * layers[-1]["attention_norm"]
    return jnp.concatenate(
        [layer["qkv"] * layer["attention_norm"] for layer in (layers[0], layers[-1])], axis=1
    )


def _start_eagle3(
    params: Params, target: Params, words: np.ndarray | None, E: int, layers: list[Any]
) -> None:
    assert words is not None
    table = target.get("unembed", target.get("embed"))
    if table is not None:
        params["unembed"] = jnp.take(table, words, axis=0)
    if layers and "final_norm" in target:
        params["final_norm"] = target["final_norm"]
    params["fc"] = params["fc"].at[:, -E:].add(jnp.eye(E))
    params["d2t"] = jnp.asarray(words - np.arange(len(words)), jnp.int32)
