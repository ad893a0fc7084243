"""First weights of a draft: random, but for the target's own where these mean the same in it."""

import jax.numpy as jnp
import numpy as np

from jaxserve.loading.assemble import NORMAL_STD, random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.base import Config, Params
from jaxserve.models.drafts.base import FeatureDraft


def first_params(
    draft: FeatureDraft, config: Config, target: LoadedModel, words: np.ndarray | None, seed: int
) -> Params:
    """Float32 params of the draft. words: the target's ids that an EAGLE-3 draft can say.

    An EAGLE-3 unembedding begins as the target's rows behind the target's last norm. The features
    keep about the size of what they are made from, which is near 1.
    """
    params = random_params(draft, config, seed, "float32")
    params["fc"] = params["fc"] / (NORMAL_STD * params["fc"].shape[1] ** 0.5)
    if words is None:
        return params
    own = target.params
    params["unembed"] = jnp.take(own["unembed" if "unembed" in own else "embed"], words, axis=0)
    if "final_norm" in own and target.model.name == "llama":  # others keep another kind of weight
        params["final_norm"] = own["final_norm"]
    return params
