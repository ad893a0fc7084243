"""Attention and cache operations: one folder per op, each with a plain-jnp reference.

The reference is the definition of an op and the oracle of every other backend. Kernels take
arrays, never engine types.
"""
