"""How a plan writes its numbers: powers of 1000, as data sheets do, and whole counts in full."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(num_bytes: float) -> str:
    """26.84 GB, 819.20 kB, 16 bytes."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 999.995 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} bytes" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"


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
