"""`jaxserve bench serve|throughput|latency`, with the flags and fields of `vllm bench`."""

import asyncio
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jaxserve.cli import bench_options as opt
from jaxserve.cli.engine_options import Batching, Threads
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.errors import InvalidRequestError

if TYPE_CHECKING:  # the real imports are in the commands: `jaxserve --help` stays quick
    from jaxserve.bench.workload import BenchRequest
    from jaxserve.llm import LLM

Workload = tuple[str, "Callable[[int], Sequence[BenchRequest]]"]  # its description, its run k


def register(app: typer.Typer) -> None:
    """Add the command group `bench`."""
    group = typer.Typer(help="Measure a server or the engine.", no_args_is_help=True)
    group.command("serve")(with_clear_errors(serve_command))
    group.command("throughput")(with_clear_errors(throughput_command))
    group.command("latency")(with_clear_errors(latency_command))
    app.add_typer(group, name="bench")


def serve_command(
    base_url: opt.BaseUrl = None,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    endpoint: opt.Endpoint = "/v1/completions",
    model: opt.ServedModel = None,
    dataset_name: opt.DatasetName = "random",
    dataset_path: opt.DatasetPath = None,
    num_prompts: opt.NumPrompts = 16,
    random_input_len: opt.InputLen = 128,
    random_output_len: opt.OutputLen = None,
    random_range_ratio: opt.RangeRatio = 0.0,
    random_vocab_size: opt.VocabSize = 32_000,
    seed: opt.Seed = 0,
    request_rate: opt.RequestRate = math.inf,
    burstiness: opt.Burstiness = 1.0,
    max_concurrency: opt.MaxConcurrency = None,
    ramp_up_strategy: opt.RampUp = None,
    ramp_up_start_rps: opt.RampStart = None,
    ramp_up_end_rps: opt.RampEnd = None,
    num_warmups: opt.NumWarmups = 0,
    compare_sequential: opt.CompareSequential = False,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    ignore_eos: opt.IgnoreEos = False,
    goodput: opt.Goodput = None,
    more_goodput: opt.MoreGoodput = None,
    percentile_metrics: opt.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: opt.MetricPercentiles = "99",
    save_result: opt.SaveResult = False,
    result_dir: opt.ResultDir = Path(),
    result_filename: opt.ResultFilename = None,
) -> None:
    """Load a running OpenAI-compatible server and report TTFT, TPOT, ITL, E2EL and throughput.

    An API key is taken from OPENAI_API_KEY. The sampling is always stated in the report.
    """
    given = dict(locals())
    given["base_url"] = (base_url or f"http://{host}:{port}").rstrip("/")
    _serve(given)


def throughput_command(
    model: opt.LocalModel = "smollm2",
    dataset_name: opt.DatasetName = "random",
    dataset_path: opt.DatasetPath = None,
    num_prompts: opt.NumPrompts = 16,
    random_input_len: opt.InputLen = 128,
    random_output_len: opt.OutputLen = None,
    random_range_ratio: opt.RangeRatio = 0.0,
    seed: opt.Seed = 0,
    compare_sequential: opt.CompareSequential = False,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    ignore_eos: opt.IgnoreEos = False,
    max_num_seqs: opt.MaxNumSeqs = None,
    batching: Batching = "continuous",
    threads: Threads = None,
    output_json: opt.OutputJson = None,
) -> None:
    """Run all prompts through the engine at once, without a server, and report tokens/s."""
    from jaxserve.bench.offline import run_throughput
    from jaxserve.bench.report import throughput_text

    given = dict(locals())
    sampling = _sampling(given)
    with _load(model, max_num_seqs, threads, batching) as llm:
        described, requests = _workload(given | {"random_vocab_size": llm.model.vocab_size})
        report = {"model": model, "workload": described, "sampling": sampling.describe()}
        report["batching"] = batching
        report |= run_throughput(llm, requests, sampling, compare_sequential=compare_sequential)
    _finish(report, throughput_text(report), output_json)


def latency_command(
    model: opt.LocalModel = "smollm2",
    batch_size: opt.BatchSize = 8,
    input_len: opt.InputLen = 32,
    output_len: opt.OutputLen = None,
    num_iters_warmup: opt.WarmupIterations = 2,
    num_iters: opt.Iterations = 10,
    seed: opt.Seed = 0,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    threads: Threads = None,
    output_json: opt.OutputJson = None,
) -> None:
    """Run one batch of prompts again and again, all to full length, and report its latency."""
    from jaxserve.bench.offline import run_latency
    from jaxserve.bench.report import latency_text
    from jaxserve.bench.workload import RandomWorkload

    sampling = _sampling(dict(locals()) | {"ignore_eos": True})
    with _load(model, max(batch_size, 16), threads) as llm:
        workload = RandomWorkload(
            batch_size, input_len, output_len or 128, llm.model.vocab_size, seed
        )
        report = {"model": model, "workload": workload.describe(), "sampling": sampling.describe()}
        report |= run_latency(
            llm, workload.requests, sampling, warmups=num_iters_warmup, iterations=num_iters
        )
    _finish(report, latency_text(report), output_json)


def _serve(given: dict[str, Any]) -> None:
    from jaxserve.bench.arrivals import Arrivals
    from jaxserve.bench.load_client import Target
    from jaxserve.bench.load_generator import first_model
    from jaxserve.bench.report import save_json, serve_text
    from jaxserve.bench.serve import ServeBench, run_serve_bench
    from jaxserve.bench.serving_metrics import parse_slos

    sampling = _sampling(given)
    arrivals = Arrivals(
        given["request_rate"],
        given["burstiness"],
        given["ramp_up_strategy"],
        given["ramp_up_start_rps"],
        given["ramp_up_end_rps"],
    )
    slos = parse_slos([*(given["goodput"] or ()), *(given["more_goodput"] or ())])
    metrics = _metrics(given["percentile_metrics"])
    percentiles = _percentiles(given["metric_percentiles"])
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model = given["model"] or asyncio.run(first_model(given["base_url"], headers))
    target = Target(
        given["base_url"] + given["endpoint"], {"model": model, **sampling.fields()}, headers
    )
    described, requests = _workload(given, as_text=target.is_chat)
    bench = ServeBench(
        target=target,
        requests=requests,
        arrivals=arrivals,
        max_concurrency=given["max_concurrency"],
        num_warmups=given["num_warmups"],
        seed=given["seed"],
        slos=slos,
        metrics=metrics,
        percentiles=percentiles,
        compare_sequential=given["compare_sequential"],
    )
    report = {"model": model, "url": target.url, "workload": described}
    report["arrivals"] = arrivals.describe(given["max_concurrency"])
    report["sampling"] = sampling.describe()
    report |= asyncio.run(run_serve_bench(bench))
    typer.echo(serve_text(report))
    if given["save_result"] or given["result_filename"]:
        default = f"serve-{time.strftime('%Y%m%d-%H%M%S')}.json"
        path = given["result_dir"] / (given["result_filename"] or default)
        save_json(report, path)
        say(f"written to {path}")


def _sampling(given: dict[str, Any]) -> Any:
    from dataclasses import fields

    from jaxserve.bench.sampling import BenchSampling

    names = [field.name for field in fields(BenchSampling)]
    return BenchSampling(**{name: given[name] for name in names if name in given})


def _workload(given: dict[str, Any], *, as_text: bool = False) -> Workload:
    """The prompts the options ask for: (a description, run number -> requests)."""
    from jaxserve.bench.workload import RandomWorkload, read_dataset

    count, seed, path = given["num_prompts"], given["seed"], given["dataset_path"]
    if given["dataset_name"] == "random" and path is None:
        workload = RandomWorkload(
            num_prompts=count,
            input_len=given["random_input_len"],
            output_len=given["random_output_len"] or 128,
            vocab_size=given["random_vocab_size"],
            seed=seed,
            range_ratio=given["random_range_ratio"],
        )
        described = workload.describe() + (" (as common words)" if as_text else "")
        return described, functools.partial(workload.requests, as_text=as_text)
    if given["dataset_name"] not in ("random", "sharegpt") or path is None:
        raise InvalidRequestError(
            f"dataset {given['dataset_name'][:40]!r} with path {path}; choose random, or sharegpt "
            "with --dataset-path FILE",
            "dataset_name",
        )
    output_len = given["random_output_len"]

    def requests(run: int) -> "Sequence[BenchRequest]":
        return read_dataset(path, count, output_len, seed + run)

    return f"{count} prompts of {path}, seed {seed}", requests


def _metrics(text: str) -> tuple[str, ...]:
    from jaxserve.bench.serving_metrics import METRICS

    asked = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in asked:
        if name not in METRICS:
            raise InvalidRequestError(
                f"percentile metric {name[:40]!r}; choose among {', '.join(METRICS)}"
            )
    return asked


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(value) for value in text.split(",") if value.strip())
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise InvalidRequestError(
            f"metric percentiles {text[:40]!r}; give numbers from 0 to 100, such as 50,90,99"
        )
    return values


def _load(
    model: str, max_batch_rows: int | None, threads: int | None, batching: str = "continuous"
) -> "LLM":
    from jaxserve.llm import LLM

    say(f"loading {model}")
    rows: dict[str, Any] = {} if max_batch_rows is None else {"max_batch_rows": max_batch_rows}
    return LLM(model, threads=threads, batching=batching, **rows)


def _finish(report: dict[str, Any], text: str, output_json: Path | None) -> None:
    from jaxserve.bench.report import save_json

    typer.echo(text)
    if output_json is not None:
        save_json(report, output_json)
        say(f"written to {output_json}")
