"""A model with everything needed to serve it."""

from dataclasses import dataclass, field

from jaxserve.loading.chat_template import ChatTemplate
from jaxserve.loading.tokenizer import Tokenizer
from jaxserve.models.base import Config, ModelDef, Params


@dataclass(frozen=True)
class LoadedModel:
    """vocab_size: ids a user or the sampler may use (rows past it are padding of the checkpoint).

    max_model_len: the checkpoint's context length. eos_token_ids: all ids that end an answer.
    chat_template is None for base models. sampling_defaults: of generation_config.json.
    """

    name: str
    model: ModelDef
    config: Config
    params: Params
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)
