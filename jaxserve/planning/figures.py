"""How a plan writes its numbers: powers of 1000, as data sheets do, and whole counts in full."""

from jaxserve.engine.memory_plan import size_text as size


def bandwidth(bytes_per_second: float) -> str:
    """3.35 TB/s."""
    return f"{size(bytes_per_second)}/s"


def milliseconds(seconds: float | None) -> str:
    """8.0 ms; ? where it is not known."""
    return "?" if seconds is None else f"{seconds * 1e3:.1f} ms"


def rate(per_second: float | None) -> str:
    """2,691; ? where it is not known."""
    if per_second is None:
        return "?"
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2f}"


def operations(count: float) -> str:
    """989.50 T, 26.03 G, 12 k."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:,.0f} "
