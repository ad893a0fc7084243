"""`--speculative-config`: vLLM's keys, and what is said about wrong ones."""

import json

import pytest

from jaxserve.engine.proposers.host_proposers import make_host_proposer
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import MAX_DRAFTS
from jaxserve.speculative_config import (
    METHODS,
    WITH_MODEL,
    SpeculativeConfig,
    parse_request_override,
)


def test_the_example_of_vllm():
    config = SpeculativeConfig.parse(
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    )
    assert config.method == "ngram"
    assert config.num_speculative_tokens == 5
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (4, 4)
    assert config.adaptive


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_number_of_drafts(method):
    settings = {"method": method} | ({"model": "m"} if method in WITH_MODEL else {})
    config = SpeculativeConfig.parse(settings)
    assert 1 <= config.num_speculative_tokens <= MAX_DRAFTS
    assert SpeculativeConfig.parse(settings | {"method": method.replace("-", "_")}) == config
    proposer = make_host_proposer(config)
    if method in ("ngram", "suffix", "lookahead"):
        assert proposer is not None
        assert proposer.name == method
    else:
        assert proposer is None


def test_what_vllm_leaves_out():
    assert SpeculativeConfig.parse({"model": "m"}).method == "draft-model"
    assert SpeculativeConfig.parse({"method": "ngram", "model": "[ngram]"}).model == "[ngram]"
    config = SpeculativeConfig.parse(
        {"method": "ngram", "draft_tensor_parallel_size": 1, "disable_by_batch_size": None}
    )
    assert config == SpeculativeConfig("ngram")
    lookup = SpeculativeConfig.parse({"method": "ngram", "prompt_lookup_min": 3})
    assert (lookup.prompt_lookup_min, lookup.prompt_lookup_max) == (3, 3)


@pytest.mark.parametrize(
    ("settings", "checkpoint"),
    [
        ({"method": "mtp"}, None),
        ({"method": "mtp", "model": "mtp"}, None),
        ({"method": "mtp", "model": "folder", "quantization": "int8"}, "folder"),
        ({"method": "eagle", "model": "eagle"}, "eagle"),
        ({"method": "ngram", "model": "[ngram]"}, None),
    ],
)
def test_which_checkpoint_is_named(settings, checkpoint):
    assert SpeculativeConfig.parse(settings).checkpoint == checkpoint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "give a JSON object"),
        ({}, "name one of ngram, suffix"),
        ({"method": "magic"}, "choose one of ngram"),
        ({"method": 3}, "choose one of ngram"),
        ({"method": "ngram", "num_tokens": 3}, "known ones: method, num_speculative_tokens, model"),
        ({"method": "ngram", "num_speculative_tokens": 0.5}, "whole number from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "whole number from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": True}, "whole number from 1 to 32"),
        ({"method": "ngram", "model": "other"}, "uses no other checkpoint"),
        ({"method": "eagle"}, "needs the checkpoint of the heads"),
        ({"method": "mtp", "model": 3}, "leave it out for the served one"),
        ({"method": "draft_model"}, "needs the checkpoint of the draft model"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "from 1 to 2"),
        ({"method": "ngram", "adaptive": 1}, "give true or false"),
        ({"method": "ngram", "draft_sample_method": "probabilistic"}, "knows no probabilities"),
        ({"model": "m", "draft_sample_method": "sure"}, "choose greedy or probabilistic"),
        ({"model": "m", "quantization": 4}, "is loaded as"),
        ({"method": "ngram", "quantization": "int8"}, "is loaded as"),
        ({"model": "m", "draft_tensor_parallel_size": 2}, "only 1 is supported"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "whole number from 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "number above 0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "above 0, at most 1"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "from 2 to 256"),
        ({"method": "lookahead", "lookahead_ngram_size": 1}, "from 2 to 16"),
    ],
)
def test_errors_say_what_to_do(given, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        SpeculativeConfig.parse(given)
    assert caught.value.param == "speculative_config"
    assert len(str(caught.value)) < 700


def test_numbers_that_are_none_are_left_out():
    text = json.dumps({"method": "suffix", "num_speculative_tokens": None})
    assert SpeculativeConfig.parse(text).num_speculative_tokens == 8


def test_requests_may_ask_for_fewer():
    assert parse_request_override(None) is None
    assert parse_request_override({}) is None
    assert parse_request_override({"num_speculative_tokens": 0}) == 0
    assert parse_request_override({"num_speculative_tokens": 4}) == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "give an object such as"),
        ({"k": 3}, "known ones: num_speculative_tokens"),
        ({"num_speculative_tokens": 33}, "from 0 to 32"),
        ({"num_speculative_tokens": -1}, "from 0 to 32"),
        ({"num_speculative_tokens": "2"}, "from 0 to 32"),
        ({"num_speculative_tokens": True}, "from 0 to 32"),
    ],
)
def test_wrong_wishes(given, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        parse_request_override(given)
    assert caught.value.param == "speculative"
