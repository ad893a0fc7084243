"""Shared test settings: CPU, strict dtypes, no network, the downloaded models as fixtures."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
