"""Workloads, targets and the tables of scripts/bench_vs_peers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines import OURS, Engine


@dataclass(frozen=True)
class Workload:
    """`streams` prompts of `input_len` tokens at once, each answered with `output_len` tokens."""

    key: str
    title: str
    unit: str
    streams: int
    input_len: int
    output_len: int
    higher_is_better: bool

    def value(self, answer: Mapping[str, Any]) -> float:
        """What one run is judged by."""
        if self.key == "token":  # time per output token after the first
            return 1e3 * (answer["last"] - answer["first"]) / (self.output_len - 1)
        if self.key == "streams":  # output tokens per second, prompts included
            return self.streams * self.output_len / answer["last"]
        return self.input_len / answer["first"]  # prompt tokens per second

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        return ours / theirs if self.higher_is_better else theirs / ours


def workloads(quick: bool) -> tuple[Workload, ...]:
    length, streams, prompt = (16, 3, 64) if quick else (128, 16, 512)
    return (
        Workload("token", "1 stream", "ms/token", 1, length, length, False),
        Workload("streams", f"{streams} streams", "tok/s", streams, length, length, True),
        Workload("prompt", f"prompt of {prompt}", "tok/s", 1, prompt, 1, True),
    )


# model -> workload -> (least ratio, the only peer it is taken against or None for the best one)
TARGETS: dict[str, dict[str, tuple[float, str | None]]] = {
    "smollm2": {
        "token": (1.3, "llama.cpp"),
        "streams": (1.3, None),
        "prompt": (1.0, None),
    },
    "gemma3-270m": {"token": (1.2, "llama.cpp"), "streams": (2.0, "llama.cpp")},
}


@dataclass(frozen=True)
class Verdict:
    """jaxserve against one peer in one workload; ratios are of the same round."""

    workload: Workload
    peer: str
    ratios: tuple[float, ...]
    target: float | None

    @property
    def passed(self) -> bool | None:
        return None if self.target is None else statistics.median(self.ratios) >= self.target

    def line(self) -> str:
        low, middle, high = min(self.ratios), statistics.median(self.ratios), max(self.ratios)
        text = f"{self.workload.title:<16}vs {self.peer:<24}{low:6.2f} /{middle:6.2f} /{high:6.2f}"
        if self.target is None:
            return text
        return f"{text}   >= {self.target:g} {'reached' if self.passed else 'MISSED'}"

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload.key,
            "peer": self.peer,
            "ratios": self.ratios,
            "ratio_median": statistics.median(self.ratios),
            "target": self.target,
            "passed": self.passed,
        }


@dataclass
class ModelResult:
    """All values of one model: values[engine][workload key], one value a round."""

    model: str
    engines: Sequence[Engine]
    workloads: Sequence[Workload]
    about: dict[str, dict[str, Any]]
    values: dict[str, dict[str, list[float]]]
    agreement: dict[str, list[float]]  # engine -> share of leading tokens equal to jaxserve's

    def verdicts(self) -> list[Verdict]:
        """Against the best variant of every family, and, with the target, of the target's peers."""
        found = []
        for workload in self.workloads:
            least, only = TARGETS[self.model].get(workload.key, (None, None))
            families = dict.fromkeys(e.family for e in self.engines if e.name != OURS)
            best = {family: self._best(workload, family) for family in families}
            against = only or self._best_family(workload, best)
            for family, engine in best.items():
                target = least if family == against else None
                found.append(self._verdict(workload, engine, target))
        return found

    def _best(self, workload: Workload, family: str) -> str:
        names = [engine.name for engine in self.engines if engine.family == family]
        return max(names, key=lambda name: self._goodness(workload, name))

    def _best_family(self, workload: Workload, best: Mapping[str, str]) -> str | None:
        return max(best, key=lambda f: self._goodness(workload, best[f])) if best else None

    def _goodness(self, workload: Workload, name: str) -> float:
        middle = statistics.median(self.values[name][workload.key])
        return middle if workload.higher_is_better else -middle

    def _verdict(self, workload: Workload, peer: str, target: float | None) -> Verdict:
        pairs = zip(self.values[OURS][workload.key], self.values[peer][workload.key], strict=True)
        return Verdict(workload, peer, tuple(workload.ratio(*pair) for pair in pairs), target)

    def rates(self, machine: Mapping[str, float]) -> dict[str, float]:
        """jaxserve's bytes and operations per second, and their share of the machine's."""
        about, values = self.about[OURS], self.values[OURS]
        prompt = next(w for w in self.workloads if w.key == "prompt")
        read = about["bytes_per_step"] / (statistics.median(values["token"]) / 1e3)
        multiplied = 2 * about["multiply_adds_per_token"] * statistics.median(values[prompt.key])
        return {
            "bytes_per_step": about["bytes_per_step"],
            "bytes_per_second": read,
            "bytes_share": read / machine["bytes_per_second"],
            "flop_per_second": multiplied,
            "flop_share": multiplied / machine["flop_per_second"],
        }

    def text(self, machine: Mapping[str, float]) -> str:
        heads = "".join(f"{w.title + ' ' + w.unit:>24}" for w in self.workloads)
        lines = [f"{self.model:<22}{heads}   same as jaxserve's"]
        for engine in self.engines:
            cells = "".join(
                f"{statistics.median(self.values[engine.name][w.key]):24.2f}"
                for w in self.workloads
            )
            shares = self.agreement.get(engine.name)
            same = f"{statistics.mean(shares):20.1%}" if shares else ""
            lines.append(f"{engine.name:<22}{cells}{same}")
        lines += ["", "times better than each peer's best variant: min / median / max of rounds"]
        lines += [verdict.line() for verdict in self.verdicts()]
        rates = self.rates(machine)
        lines += [
            "",
            f"jaxserve alone reads {rates['bytes_per_step'] / 1e6:.1f} MB a token: "
            f"{rates['bytes_per_second'] / 1e9:.1f} GB/s, {rates['bytes_share']:.0%} of what this "
            "machine reads",
            f"jaxserve in prompts: {rates['flop_per_second'] / 1e9:.0f} GFLOP/s in the layers' "
            f"matrices, {rates['flop_share']:.0%} of numpy's sgemm",
        ]
        return "\n".join(lines)

    def as_json(self, machine: Mapping[str, float]) -> dict[str, Any]:
        return {
            "engines": self.about,
            "values": self.values,
            "leading_tokens_equal": self.agreement,
            "ratios": [verdict.as_json() for verdict in self.verdicts()],
            "jaxserve_rates": self.rates(machine),
        }
