"""Sizes as people write them: 1GiB, 512M, 1.5gb, 1048576."""

import re

_UNITS = {
    "": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([a-z]*)", re.ASCII)


def parse_byte_size(text: str) -> int:
    """Bytes. K, M, G, T and KiB ... are powers of 1024; KB ... powers of 1000.

    Raises ValueError that says what to write.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text[:40]!r} is not a size; write for example 1GiB, 512MiB or 800000000"
        )
    return int(float(match[1]) * unit)


def show_byte_size(size: int) -> str:
    """The size in the largest unit of 1024 that keeps the number at 1 or above."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
