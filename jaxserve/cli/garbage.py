"""When Python looks for garbage: rarely while a command starts, as usual once it serves.

Imports and loading make hundreds of thousands of objects that all stay, and the collector would
walk over them again and again: about a tenth of a start.
"""

import gc

_USUAL = gc.get_threshold()
_STARTING = (50_000, *_USUAL[1:])


def collect_rarely() -> None:
    """Until `collect_as_usual`."""
    gc.set_threshold(*_STARTING)


def collect_as_usual() -> None:
    """Also, leave what there is by now out of every later collection: it stays."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
