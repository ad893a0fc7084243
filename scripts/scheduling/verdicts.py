"""What a benchmark's item found: its table, its targets, and both as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Rows = list[Sequence[str]]


@dataclass(frozen=True)
class Target:
    """A value that must be at most (or, `at_least`, at least) `limit`."""

    name: str
    value: float
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "reached" if self.reached else "MISSED"
        name = f"{self.name} {self.value:.4g}{self.unit}"
        return f"{name:<66} {sign} {self.limit:.4g}{self.unit} {verdict}"


@dataclass
class Report:
    """One item. rows: a table whose first row is its head; numbers: what only the JSON has."""

    item: str
    about: str
    rows: Rows = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [f"{self.item}: {self.about}"]
        for first, *rest in self.rows:
            cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
            lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
        return "\n".join([*lines, *self.notes, *(target.line() for target in self.targets)])

    def as_json(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "table": self.rows,
            "notes": self.notes,
            "targets": [
                {
                    "name": target.name,
                    "value": target.value,
                    "limit": target.limit,
                    "at_least": target.at_least,
                    "reached": target.reached,
                }
                for target in self.targets
            ],
            **self.numbers,
        }
