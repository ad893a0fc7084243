"""A plan as coloured tables, for terminals."""

from rich import box
from rich.console import Console
from rich.table import Table

from jaxserve.planning.plan_text import Section, headline, sections
from jaxserve.planning.serving_plan import ServingPlan


def print_tables(console: Console, plan: ServingPlan) -> None:
    """All tables of the plan."""
    for line in headline(plan):
        console.print(line, style="bold", markup=False, highlight=False)
    for section in sections(plan):
        console.print()
        console.print(_table(section))
        for note in section.notes:
            style = "yellow" if note.startswith("warning") else "dim"
            console.print(note, style=style, markup=False, highlight=False)


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", box=box.SIMPLE_HEAD)
    for name, side in zip(section.columns, section.align, strict=True):
        table.add_column(name, justify="right" if side == ">" else "left")
    for row in section.rows:
        table.add_row(*row)
    return table
