"""Measures jaxserve and its peers in turns on one machine and prints ratios; see bench_vs_peers.

Every engine lives in a process and an environment of its own (scripts/peers/*_worker.py). Only one
works at a time: the others are stopped by a signal, so that no idle thread pool spins. In each
round every engine gets the same prompts of random ids (new ones each time, so that no prefix cache
knows them), the order of the engines turning by one from round to round. Greedy, EOS ignored;
every engine must say that it computed the whole prompt and made exactly the tokens asked for.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from comparison import TARGETS, ModelResult, Workload, workloads
from engines import ENGINES, OURS, PEERS, ROOT, SCRIPTS, Engine, EngineProcess, environment

from jaxserve.loading.hub import resolve

REPORT = ROOT / "results" / "vs_peers_cpu.json"
ORDINARY_IDS = range(1000, 40_000)  # of both vocabularies: no special tokens, no bytes
Prompts = list[list[int]]


def say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def draw(workload: Workload, seed: str) -> Prompts:
    numbers = random.Random(seed)
    return [numbers.choices(ORDINARY_IDS, k=workload.input_len) for _ in range(workload.streams)]


def machine_rates(threads: int) -> dict[str, float]:
    command = [sys.executable, str(SCRIPTS / "machine_rates.py"), str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), check=True)
    return dict(json.loads(done.stdout))


def machine_facts(threads: int) -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": model,
        "threads": threads,
        "load_before": os.getloadavg()[0],
    }


def weights_path(engine: Engine, model: str, gguf: Path) -> Path:
    """The file or folder that this engine loads."""
    return gguf if engine.weights == "gguf" else PEERS / "models" / model / engine.weights


def prepare(engines: Sequence[Engine], model: str, gguf: Path) -> None:
    """Make the OpenVINO folders that are missing."""
    converter = next((e for e in engines if e.weights != "gguf"), None)
    if converter is not None:
        command = [converter.python, str(SCRIPTS / "prepare_openvino.py")]
        subprocess.run([*command, str(gguf), str(PEERS / "models" / model)], check=True)


def leading_share(mine: Prompts, theirs: Prompts) -> float:
    """Share of tokens up to each stream's first difference."""
    equal = 0
    for ours, other in zip(mine, theirs, strict=True):
        differences = (
            i for i, pair in enumerate(zip(ours, other, strict=True)) if len({*pair}) > 1
        )
        equal += next(differences, len(ours))
    return equal / sum(map(len, mine))


def measure(
    processes: Sequence[EngineProcess], model: str, loads: Sequence[Workload], rounds: int
) -> ModelResult:
    engines = [process.engine for process in processes]
    values = {e.name: {load.key: [] for load in loads} for e in engines}
    result = ModelResult(
        model, engines, loads, {p.engine.name: p.about for p in processes}, values, {}
    )
    for number in range(rounds):
        say(f"{model}: round {number + 1} of {rounds}")
        turn = number % len(processes)
        order = [*processes[turn:], *processes[:turn]]
        for load in loads:
            prompts = draw(load, f"{number} {load.key}")
            answers = {p.engine.name: p.run(prompts, load.output_len) for p in order}
            for name, answer in answers.items():
                values[name][load.key].append(load.value(answer))
                if answer["ids"] and name != OURS and load.key != "prompt":
                    share = leading_share(answers[OURS]["ids"], answer["ids"])
                    result.agreement.setdefault(name, []).append(share)
    return result


def bench_model(
    model: str, engines: Sequence[Engine], loads: Sequence[Workload], options: argparse.Namespace
) -> ModelResult:
    gguf = resolve(model)
    prepare(engines, model, gguf)
    load = {
        "threads": options.threads,
        "streams": max(w.streams for w in loads),
        "context": 128 + max(w.input_len + w.output_len for w in loads),
    }
    with ExitStack() as stack:
        processes = []
        for engine in engines:
            say(f"{model}: loading {engine.name}")
            path = str(weights_path(engine, model, gguf))
            process = EngineProcess(engine, {**load, "path": path})
            stack.callback(process.close)
            for workload in loads:
                process.run(draw(workload, f"warm-up {workload.key}"), min(4, workload.output_len))
            processes.append(process)
        return measure(processes, model, loads, options.rounds)


def chosen(options: argparse.Namespace, model: str) -> list[Engine]:
    wanted = options.engines
    return [
        engine
        for engine in ENGINES
        if model in engine.models
        and (
            engine.name == OURS
            or (wanted is None and engine.default)
            or (wanted is not None and ("all" in wanted or engine.name in wanted))
        )
    ]


def parse() -> argparse.Namespace:
    names = [engine.name for engine in ENGINES]
    parser = argparse.ArgumentParser(
        prog="scripts/bench_vs_peers", description="jaxserve against other engines on this CPU."
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="few tokens: does everything run?")
    parser.add_argument("--models", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[*names, "all"],
        metavar="NAME",
        help=f"default: the usual ones; all, or some of {', '.join(names)}",
    )
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=REPORT,
        metavar="FILE",
        help=f"write a report; default file {REPORT.relative_to(ROOT)}",
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


def main() -> None:
    options = parse()
    loads = workloads(options.quick)
    facts = machine_facts(options.threads)
    before = machine_rates(options.threads)
    results = [
        bench_model(model, chosen(options, model), loads, options) for model in options.models
    ]
    after = machine_rates(options.threads)
    rates = {name: max(value, after[name]) for name, value in before.items()}
    if options.quick:
        print("QUICK RUN: few tokens, one round; the numbers and verdicts below mean nothing")
    for name, value in facts.items():
        print(f"{name:<14}{value}")
    print(f"{'reads':<14}{rates['bytes_per_second'] / 1e9:.1f} GB/s (512 MB, all threads)")
    print(f"{'multiplies':<14}{rates['flop_per_second'] / 1e9:.0f} GFLOP/s (numpy, float32, 2048)")
    for result in results:
        print()
        for name, about in result.about.items():
            print(f"{name:<22}{about['version']}; {about['settings']}")
        print()
        print(result.text(rates))
    if options.json:
        report = {
            **facts,
            **rates,
            "quick": options.quick,
            "models": {result.model: result.as_json(rates) for result in results},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        say(f"written to {options.json}")


if __name__ == "__main__":
    main()
