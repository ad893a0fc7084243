"""Sampling on the device: logits in, tokens and logprobs out, as pure functions."""

from jaxserve.sampling.drafting import draft
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import make_state, set_slot
from jaxserve.sampling.trees import verify_tree
from jaxserve.sampling.verify import verify

__all__ = ["draft", "make_state", "sample", "set_slot", "verify", "verify_tree"]
