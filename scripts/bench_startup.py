"""How long from starting the process to the first token, without and with what a start keeps.

Usage: python scripts/bench_startup.py [--model smollm2] [--runs 3]

Runs `jaxserve generate MODEL hi --max-tokens 1` in processes of its own, with a program cache that
is empty at first, until the first character is printed; of the later runs the best counts. The
model must have been pulled. CPU seconds are those of the whole process, its exit included: they say
more than the clock while a machine is busy with something else.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time

FIRST, LATER = "first start, nothing compiled", "later start"
TARGETS = {FIRST: 90.0, LATER: 5.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=3, help="later starts to take the best of")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        report(FIRST, *start(options.model, cache))
        report(LATER, *min(start(options.model, cache) for _ in range(max(options.runs, 1))))


def start(model: str, cache: str) -> tuple[float, float, str]:
    """Seconds to the first token, CPU seconds until the exit, and what the command said."""
    command = [sys.executable, "-m", "jaxserve", "generate", model, "hi", "--max-tokens", "1"]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    cpu_before, began = children_cpu(), time.perf_counter()
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        said = process.communicate()[1]
    if not first or process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{said}")
    return seconds, children_cpu() - cpu_before, said


def children_cpu() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(name: str, seconds: float, cpu: float, said: str) -> None:
    target = TARGETS[name]
    verdict = "reached" if seconds <= target else "MISSED"
    print(f"{name}: first token after {seconds:.1f} s   <= {target:g} s {verdict}")
    print(f"    {cpu:.1f} CPU seconds until the exit")
    for line in said.splitlines():
        print(f"    {line}")


if __name__ == "__main__":
    main()
