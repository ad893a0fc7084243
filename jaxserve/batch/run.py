"""Runs what of a batch has no result yet: reads, generates and writes side by side."""

from collections.abc import Callable, Iterator

from jaxserve.batch.input_file import InputFile
from jaxserve.batch.line_job import LineJob, LineReader
from jaxserve.batch.results_file import ResultsFile
from jaxserve.engine.offline_batch import BatchProgress, OfflineBatch


def start_progress(source: InputFile, results: ResultsFile) -> BatchProgress:
    """Where the batch stands before the run."""
    return BatchProgress(source.num_requests, results.num_done, results.num_failed)


def run_batch(
    source: InputFile,
    results: ResultsFile,
    reader: LineReader,
    *,
    max_open: int,
    progress: BatchProgress,
    tell: Callable[[BatchProgress], None] | None = None,
) -> None:
    """Append a result for every line without one, in the order in which they end.

    max_open: choices read ahead and open in the engine at once. Raises BatchFileError and
    EngineDeadError; whatever ends it, the results written so far stay and count.
    """
    jobs = _jobs(source, results, reader)
    for job in OfflineBatch(reader.client, jobs, progress=progress, max_open=max_open).run(tell):
        line, failed = job.result()
        results.append(job.number, line, failed=failed)
        progress.failed_jobs += failed


def _jobs(source: InputFile, results: ResultsFile, reader: LineReader) -> Iterator[LineJob]:
    seen: set[int] = set()  # keys of custom_ids: some 70 bytes a line
    for line in source.lines():
        if not results.is_done(line.number):
            yield reader.job(line, seen)
        elif key := results.id_key(line.number):
            seen.add(key)
