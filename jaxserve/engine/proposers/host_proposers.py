"""The proposers that need nothing but tokens, made from a configuration."""

from jaxserve.engine.proposers.base import Proposer
from jaxserve.engine.proposers.lookahead import LookaheadProposer
from jaxserve.engine.proposers.ngram import NgramProposer
from jaxserve.engine.proposers.suffix import SuffixProposer
from jaxserve.speculative_config import SpeculativeConfig


def make_host_proposer(config: SpeculativeConfig) -> Proposer | None:
    """The proposer of ngram, suffix or lookahead; None: the method needs the device."""
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    if config.method == "lookahead":
        return LookaheadProposer(config.lookahead_ngram_size, config.lookahead_ngrams)
    return None
