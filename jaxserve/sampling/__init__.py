"""Sampling on the device: logits in, tokens and logprobs out, as pure functions."""

from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import make_state, set_slot

__all__ = ["make_state", "sample", "set_slot"]
