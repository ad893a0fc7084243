"""How long from starting the process to the first token, without and with compiled programs.

Usage: python scripts/bench_startup.py [--model smollm2]

Runs `jaxserve generate MODEL hi --max-tokens 1` twice in processes of its own, with a program cache
that is empty at first, until the first character is printed. The model must have been pulled.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

TARGETS = {"first start, nothing compiled": 90.0, "second start": 15.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    model = parser.parse_args().model
    command = [sys.executable, "-m", "jaxserve", "generate", model, "hi", "--max-tokens", "1"]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        for name, target in TARGETS.items():
            start = time.perf_counter()
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                first = process.stdout.read(1)
                seconds = time.perf_counter() - start
                phases = process.communicate()[1]
            if not first or process.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{phases}")
            verdict = "reached" if seconds <= target else "MISSED"
            print(f"{name}: first token after {seconds:.1f} s   <= {target:g} s {verdict}")
            for line in phases.splitlines():
                if line.startswith("ready"):
                    print(f"    {line}")


if __name__ == "__main__":
    main()
