"""The same engine split over two devices says the same: sharding needs no other code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.support.tiny_engine import drive, random_prompts, request, tiny_engine, tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent


def requests() -> list[Request]:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
    prompts = random_prompts(4, (3, 70), seed=8)
    return [
        request(str(i), prompt, params)
        for i, (prompt, params) in enumerate(zip(prompts, [greedy, seeded] * 2, strict=True))
    ]


@pytest.mark.slow
def test_two_devices_give_the_same_tokens() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.two_devices"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["devices"] == 2
    assert report["tokens"] == drive(tiny_engine(tiny_model()), requests()).tokens
