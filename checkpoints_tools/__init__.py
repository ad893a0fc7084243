"""Tools that make and check checkpoints, beside the engine: see `python -m checkpoints_tools -h`.

They may import jaxserve; jaxserve never imports them. Training needs the extra `train` (optax).
"""
