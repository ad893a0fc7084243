"""Runs the tiny engine on two forced host devices and prints its tokens; see test_two_devices."""

import json

import jax

from tests.engine.test_two_devices import requests
from tests.support.tiny_engine import drive, tiny_engine, tiny_model


def main() -> None:
    devices = jax.devices()
    assert len(devices) == 2, "start me with --xla_force_host_platform_device_count=2"
    engine = tiny_engine(tiny_model(), devices=devices)
    split = engine.runner.pool.keys[0].sharding.num_devices
    print(json.dumps({"tokens": drive(engine, requests()).tokens, "devices": split}))


if __name__ == "__main__":
    main()
