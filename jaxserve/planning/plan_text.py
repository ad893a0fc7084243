"""A plan in words: tables whose rows show the arithmetic, with the numbers put in."""

from dataclasses import dataclass
from typing import Any

from jaxserve.planning import figures
from jaxserve.planning.figures import size
from jaxserve.planning.roofline import DecodeStep
from jaxserve.planning.serving_plan import Fit, ServingPlan
from jaxserve.planning.weights import WeightKind


@dataclass(frozen=True)
class Section:
    """A table. Columns that hold numbers are marked ">", others "<"."""

    title: str
    columns: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def sections(plan: ServingPlan) -> tuple[Section, ...]:
    """All tables of a plan, in order."""
    return (_memory(plan), _kv(plan), _fits(plan), _buckets(plan), _roofline(plan))


def headline(plan: ServingPlan) -> tuple[str, ...]:
    """What the plan is of."""
    device = plan.device
    speeds = [f"{size(device.memory)} of memory" if device.memory else "memory unknown"]
    if device.bandwidth:
        speeds.append(figures.bandwidth(device.bandwidth))
    if plan.matrix_rate:
        speeds.append(f"{figures.operations(plan.matrix_rate)}op/s in {plan.shape.dtype.name}")
    return (
        f"{plan.model.name} ({plan.model.source}), {plan.shape.dtype.name}, "
        f"KV cache in {plan.shape.kv_dtype.name}",
        f"{device.title}: {', '.join(speeds)} ({device.source})",
    )


def _memory(plan: ServingPlan) -> Section:
    memory = plan.memory
    kinds = [_weight_row(kind) for kind in plan.weights]
    slots, vocab = plan.shape.limits.max_batch_rows + 1, plan.model.vocab_size
    rows = [
        *kinds,
        ("temporaries", size(memory.temporaries), _how_temporaries(plan)),
        (
            "sampling state",
            size(memory.sampling_state),
            f"{slots} slots x {vocab:,} tokens x 5 bytes",
        ),
        ("KV pool", size(memory.pool), _how_pool(plan)),
    ]
    if memory.host_tier:
        rows.append(("KV in host memory", size(memory.host_tier), "--kv-host-memory"))
    limit = "" if memory.device_memory is None else f"of {size(memory.device_memory)}"
    rows.append(("together", size(memory.on_device), limit))
    warning = memory.warning
    notes = (f"warning: {warning}",) if warning else ()
    return Section("Memory", ("what", "size", "from"), "<><", tuple(rows), notes)


def _weight_row(kind: WeightKind) -> tuple[str, str, str]:
    bits = kind.bits
    each = f"{bits / 8:g} bytes" if bits % 8 == 0 else f"{bits:.3f} bits"
    return f"weights, {kind.name}", size(kind.num_bytes), f"{kind.numbers:,} numbers x {each}"


def _how_temporaries(plan: ServingPlan) -> str:
    bucket = plan.largest
    step = f"{bucket.name}: {bucket.num_tokens} tokens in {bucket.num_rows} rows"
    if plan.cost is None:
        return f"an estimate for {step}"
    for_what = plan.device.title if plan.device.is_gpu else "this machine"
    return f"{step}, compiled for {for_what}"


def _how_pool(plan: ServingPlan) -> str:
    pages = f"{plan.shape.num_pages:,} pages x {size(plan.page_bytes)}"
    if plan.shape.num_pages < plan.num_pages:
        rows = plan.shape.limits.max_batch_rows
        ended = " and the prefix cache" if plan.config.prefix_cache else ""
        return (
            f"{pages}: {rows} rows of {plan.shape.max_model_len:,} tokens{ended} need no more; "
            f"{plan.num_pages:,} would fit"
        )
    memory = plan.memory
    if memory.usable is None or memory.device_memory is None:
        return pages
    share = memory.usable / memory.device_memory
    return f"{pages}: what the rest leaves of {share:g} x {size(memory.device_memory)}"


def _kv(plan: ServingPlan) -> Section:
    spec, layout, itemsize = plan.kv_spec, plan.layout, plan.kv_itemsize
    number = f"({{}} x {itemsize} + 4)" if itemsize == 1 else f"{{}} x {itemsize}"
    parts = [
        f"{len(group.layers)} layers x {group.num_kv_heads} heads x "
        f"{number.format(group.head_dim)} bytes"
        + (f" (window {group.window:,})" if group.window else "")
        for group in spec.groups
    ]
    token = "2 x " + (parts[0] if len(parts) == 1 else f"({' + '.join(parts)})")
    per_page = layout.page_bytes(1, itemsize)
    tables = ""
    if layout.num_tables > 1:
        tables = f", of the {layout.num_arrays} layers of one of {layout.num_tables} page tables"
    rows = (
        ("a token", f"{spec.bytes_per_token(itemsize):,} bytes", token),
        (
            "a page",
            f"{plan.page_bytes:,} bytes",
            f"{plan.shape.page_size} tokens x {per_page:,} bytes{tables}",
        ),
        (
            "pages",
            f"{plan.shape.num_pages - 1:,}",
            f"{plan.shape.num_pages:,}, without page 0, which nobody gets",
        ),
    )
    return Section("KV cache", ("of", "size", "from"), "<><", rows)


def _fits(plan: ServingPlan) -> Section:
    rows = tuple(_fit_row(plan, fit) for fit in plan.fits)
    limit = plan.shape.limits.max_batch_rows
    notes: tuple[str, ...] = ()
    if any(fit.batch > limit for fit in plan.fits):
        notes = (f"--max-batch-rows is {limit}: raise it to run more at once",)
    columns = ("context", "sequences", "from")
    return Section("Largest batch that the memory holds", columns, ">><", rows, notes)


def _fit_row(plan: ServingPlan, fit: Fit) -> tuple[str, str, str]:
    usable = max(plan.num_pages - 1, 0)
    return f"{fit.context:,}", f"{fit.batch:,}", f"{usable:,} pages / {fit.pages:,}"


def _buckets(plan: ServingPlan) -> Section:
    rows = tuple(
        (bucket.name, str(bucket.num_rows), str(bucket.num_tokens)) for bucket in plan.shape.buckets
    )
    cost = plan.cost
    if cost is None:
        notes = (plan.no_cost,) if plan.no_cost else ()
    else:
        counted = (
            ""
            if cost.operations is None
            else f" and {figures.operations(cost.operations)}op (loops counted once)"
        )
        notes = (f"{cost.bucket.name}, by XLA: {cost.temporaries:,} bytes of temporaries{counted}",)
    return Section("Steps that are compiled", ("name", "rows", "tokens"), "<>>", rows, notes)


def _roofline(plan: ServingPlan) -> Section:
    rows = [_decode_row(plan, step) for step in plan.decode]
    rate, work = plan.matrix_rate, plan.work.layers
    how = (
        f"{figures.operations(rate)}op/s / {figures.operations(work)}op a token"
        if rate
        else f"{figures.operations(work)}op a token; the matrix rate is not known"
    )
    rows.append(("prefill", "", "", figures.rate(plan.prefill), "", how))
    title = f"Roofline at {plan.context:,} tokens of context: the least a step can take"
    columns = ("batch", "reads", "step", "tokens/s", "fits", "from")
    return Section(title, columns, ">>>>><", tuple(rows))


def _decode_row(plan: ServingPlan, step: DecodeStep) -> tuple[str, ...]:
    each = (step.read_bytes - plan.memory.weights) // step.batch
    speed = plan.device.bandwidth
    if step.bound == "compute" and plan.matrix_rate:
        how = (
            f"{figures.operations(step.operations)}op / {figures.operations(plan.matrix_rate)}op/s"
        )
    else:
        how = f"({size(plan.memory.weights)} + {step.batch:,} x {size(each)})"
        how += f" / {figures.bandwidth(speed)}" if speed else "; the bandwidth is not known"
    return (
        f"{step.batch:,}",
        size(step.read_bytes),
        figures.milliseconds(step.seconds),
        figures.rate(step.tokens_per_second),
        "yes" if step.batch <= _held(plan) else "no",
        how,
    )


def _held(plan: ServingPlan) -> int:
    return next(fit.batch for fit in plan.fits if fit.context == plan.context)


def plain_text(plan: ServingPlan) -> str:
    """All of it, in columns, without colours: for pipes and files."""
    blocks = ["\n".join(headline(plan))]
    for section in sections(plan):
        lines = [section.title, *_aligned(section), *section.notes]
        blocks.append("\n  ".join(lines))
    return "\n\n".join(blocks)


def _aligned(section: Section) -> list[str]:
    table = (section.columns, *section.rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}"
            for cell, side, width in zip(row, section.align, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def plan_report(plan: ServingPlan) -> dict[str, Any]:
    """All numbers, for scripts. Sizes are bytes, times seconds; null: not known."""
    device, cost = plan.device, plan.cost
    return {
        "model": plan.model.name,
        "source": plan.model.source,
        "device": {
            "name": device.name,
            "title": device.title,
            "source": device.source,
            "memory": device.memory,
            "bandwidth": device.bandwidth,
            "matrix_rate": plan.matrix_rate,
        },
        "dtype": plan.shape.dtype.name,
        "kv_dtype": plan.shape.kv_dtype.name,
        "memory": _memory_report(plan),
        "weights": [
            {"kept_as": kind.name, "numbers": kind.numbers, "bytes": kind.num_bytes}
            for kind in plan.weights
        ],
        "kv_bytes_per_token": plan.kv_spec.bytes_per_token(plan.kv_itemsize),
        "page_size": plan.shape.page_size,
        "page_bytes": plan.page_bytes,
        "num_pages": plan.shape.num_pages - 1,
        "max_model_len": plan.shape.max_model_len,
        "largest_batch": [
            {"context": fit.context, "pages_each": fit.pages, "batch": fit.batch}
            for fit in plan.fits
        ],
        "buckets": [
            {"name": bucket.name, "rows": bucket.num_rows, "tokens": bucket.num_tokens}
            for bucket in plan.shape.buckets
        ],
        "largest_step": None
        if cost is None
        else {
            "bucket": cost.bucket.name,
            "temporaries": cost.temporaries,
            "operations": cost.operations,
        },
        "context": plan.context,
        "decode": [_decode_report(plan, step) for step in plan.decode],
        "prefill_tokens_per_second": plan.prefill,
        "operations_per_prompt_token": plan.work.layers,
    }


def _memory_report(plan: ServingPlan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "weights": memory.weights,
        "kv_pool": memory.pool,
        "temporaries": memory.temporaries,
        "temporaries_are_exact": plan.cost is not None,
        "sampling_state": memory.sampling_state,
        "kv_host_memory": memory.host_tier,
        "total": memory.on_device,
        "usable": memory.usable,
        "warning": memory.warning,
    }


def _decode_report(plan: ServingPlan, step: DecodeStep) -> dict[str, Any]:
    return {
        "batch": step.batch,
        "read_bytes": step.read_bytes,
        "operations": step.operations,
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "bound": step.bound,
        "fits": step.batch <= _held(plan),
    }
