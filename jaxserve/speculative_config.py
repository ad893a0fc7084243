"""What a user says about speculation: vLLM's `--speculative-config` JSON, and one key of a request.

The names and meanings are vLLM's; `adaptive` and the keys that begin with `lookahead_` are ours.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import MAX_DRAFTS, is_int

_PARAM = "speculative_config"
_REQUEST_PARAM = "speculative"
_REQUEST_KEYS = ("num_speculative_tokens",)

_DEFAULT_DRAFTS = {
    "ngram": 8,
    "suffix": 8,
    "lookahead": 4,
    "draft-model": 4,
    "medusa": 4,
    "eagle": 4,
    "eagle3": 4,
    "mtp": 1,
}
METHODS = tuple(_DEFAULT_DRAFTS)
WITH_MODEL = ("draft-model", "medusa", "eagle", "eagle3")  # another checkpoint beside the target's
_MAY_HAVE_MODEL = (*WITH_MODEL, "mtp")  # whose checkpoint is mostly the target's own

# Keys of vLLM that say how its own machinery runs: taken where they ask for what is done here.
_ONLY = {
    "draft_tensor_parallel_size": 1,
    "rejection_sample_method": "standard",
    "parallel_drafting": False,
    "disable_padded_drafter_batch": False,
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How an engine speculates.

    Raises InvalidRequestError when a value is out of range or does not go with the method.
    """

    method: str
    num_speculative_tokens: int = (
        0  # drafts of a request in a step at most; 0: the method's default
    )
    model: str | None = None  # the draft model's or the heads' checkpoint, named as the target is
    quantization: str | None = None  # what to load the draft model as
    draft_sample_method: str = (
        "greedy"  # probabilistic: drafts are drawn, and judged by min(1, q/p)
    )
    adaptive: bool = True  # False: all drafts in every step, also where that makes it slower
    disable_by_batch_size: int | None = None  # from so many running requests on: no drafts
    prompt_lookup_max: int = 5  # tokens that the text's end must share with an earlier place
    prompt_lookup_min: int = 2
    suffix_decoding_max_tree_depth: int = 24  # tokens of the text's end that are matched
    suffix_decoding_max_cached_requests: int = 10_000  # earlier outputs kept; 0: none
    suffix_decoding_max_spec_factor: float = 1.0  # drafts per matched token
    suffix_decoding_min_token_prob: float = 0.1  # what drafts must have by the counts
    lookahead_ngram_size: int = 4  # tokens of an n-gram, the known one included
    lookahead_ngrams: int = 8  # n-grams kept for each first token

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method))
        number = self.num_speculative_tokens
        if number == 0 and is_int(number):
            object.__setattr__(self, "num_speculative_tokens", _DEFAULT_DRAFTS[self.method])
        else:
            _check_int("num_speculative_tokens", number, 1, MAX_DRAFTS)
        self._check_model()
        if not isinstance(self.adaptive, bool):
            _refuse("adaptive", self.adaptive, "give true or false")
        self._check_draft_sample_method()
        if self.disable_by_batch_size is not None:
            _check_int("disable_by_batch_size", self.disable_by_batch_size, 1, 1 << 20)
        _check_int("prompt_lookup_max", self.prompt_lookup_max, 1, 32)
        _check_int("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, 256)
        cached = self.suffix_decoding_max_cached_requests
        _check_int("suffix_decoding_max_cached_requests", cached, 0, 1 << 20)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 32)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 1)
        _check_int("lookahead_ngram_size", self.lookahead_ngram_size, 2, 16)
        _check_int("lookahead_ngrams", self.lookahead_ngrams, 1, 64)

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> "SpeculativeConfig":
        """From the JSON text of `--speculative-config`, or the object it stands for."""
        settings = _from_json(given) if isinstance(given, str) else given
        if not isinstance(settings, Mapping):
            raise InvalidRequestError(
                f"{_PARAM} is {_show(settings)}; give a JSON object such as "
                '{"method": "ngram", "num_speculative_tokens": 8}',
                _PARAM,
            )
        known = [field.name for field in fields(cls)]
        _check_keys(settings, [*known, *_ONLY], _PARAM)
        for key, only in _ONLY.items():
            if settings.get(key) not in (None, only):
                _refuse(key, settings[key], f"only {json.dumps(only)} is supported: leave it out")
        chosen = {key: settings[key] for key in known if settings.get(key) is not None}
        if "prompt_lookup_max" in chosen:  # vLLM's rule: one of the two stands for both
            chosen.setdefault("prompt_lookup_min", chosen["prompt_lookup_max"])
        elif "prompt_lookup_min" in chosen:
            chosen["prompt_lookup_max"] = chosen["prompt_lookup_min"]
        if "method" not in chosen:
            if "model" not in chosen:
                _refuse("method", None, f"name one of {', '.join(METHODS)}")
            chosen["method"] = "draft-model"
        return cls(**chosen)

    @property
    def checkpoint(self) -> str | None:
        """What `model` names; None: nothing, or the served checkpoint."""
        names_none = self.method not in WITH_MODEL and self.model in self._own_names
        return None if names_none else self.model

    @property
    def _own_names(self) -> tuple[str | None, ...]:
        return None, self.method, f"[{self.method}]"  # vLLM took the method's name

    def _check_draft_sample_method(self) -> None:
        method = self.draft_sample_method
        if method not in ("greedy", "probabilistic"):
            _refuse("draft_sample_method", method, "choose greedy or probabilistic")
        if method == "probabilistic" and self.method in ("ngram", "suffix", "lookahead"):
            _refuse("draft_sample_method", method, f"{self.method} knows no probabilities: greedy")

    def _check_model(self) -> None:
        model = self.model
        if self.method in WITH_MODEL:
            if not isinstance(model, str) or not model:
                what = "draft model" if self.method == "draft-model" else "heads"
                _refuse("model", model, f"{self.method} needs the checkpoint of the {what}")
        elif self.method in _MAY_HAVE_MODEL:
            if model is not None and (not isinstance(model, str) or not model):
                _refuse("model", model, "name a checkpoint, or leave it out for the served one")
        elif model not in self._own_names:
            _refuse("model", model, f"{self.method} uses no other checkpoint: leave it out")
        quantization = self.quantization
        if quantization is not None and (
            not isinstance(quantization, str) or self.method not in _MAY_HAVE_MODEL
        ):
            want = f"it names what the checkpoint of {', '.join(_MAY_HAVE_MODEL)} is loaded as"
            _refuse("quantization", quantization, want)


def parse_request_override(given: Any) -> int | None:
    """The most drafts per step that a request wants: of its `speculative` object. None: no wish.

    Raises InvalidRequestError for other keys, and for numbers that no server speculates with.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"{_REQUEST_PARAM} is {_show(given)}; give an object such as "
            '{"num_speculative_tokens": 0}',
            _REQUEST_PARAM,
        )
    _check_keys(given, _REQUEST_KEYS, _REQUEST_PARAM)
    number = given.get("num_speculative_tokens")
    if number is None:
        return None
    if not is_int(number) or not 0 <= number <= MAX_DRAFTS:
        raise InvalidRequestError(
            f"{_REQUEST_PARAM}.num_speculative_tokens is {_show(number)}; give a whole number from "
            f"0 to {MAX_DRAFTS} (more than the server speculates with means as many as that)",
            _REQUEST_PARAM,
        )
    return int(number)


def _method(given: Any) -> str:
    name = given.replace("_", "-") if isinstance(given, str) else ""
    if name not in METHODS:
        _refuse("method", given, f"choose one of {', '.join(METHODS)}")
    return name


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{_PARAM} is not JSON: {_show(text)}; give an object such as "
            '{"method": "ngram", "num_speculative_tokens": 8}',
            _PARAM,
        ) from error


def _check_keys(given: Mapping[str, Any], known: "list[str] | tuple[str, ...]", param: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InvalidRequestError(
            f"{param} has the unknown key {_show(unknown[0])}; known ones: {', '.join(known)}",
            param,
        )


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not is_int(value) or not low <= value <= high:
        _refuse(name, value, f"give a whole number from {low} to {high}")


def _check_number(name: str, value: Any, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= high:
        _refuse(name, value, f"give a number above 0, at most {high:g}")


def _refuse(name: str, value: Any, want: str) -> None:
    raise InvalidRequestError(f"{_PARAM}: {name} is {_show(value)}; {want}", _PARAM)


def _show(value: Any) -> str:
    """A short form of a user's value: errors never echo long input."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
