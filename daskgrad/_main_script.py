"""Whether the script that runs now may start processes: each of them runs the script again, up to its guard."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from ._errors import PlanError


def must_be_guarded(call: str) -> None:
    """Refuse a call that starts processes from a line of the main script that these would run too.

    A process started by spawn or forkserver imports the main script under another name. Without a guard it comes to
    the same call, is refused by Python, and dies; whoever started it tries again and prints each time.

    Args:
        call: what was called, for the message.

    Raises:
        PlanError: the line is not under `if __name__ == "__main__":`.
    """
    main = sys.modules.get("__main__")
    if main is None or not _is_run_again(main):
        return
    line = _line_running(main)
    if line is not None and not _guarded(_source(main), line):
        raise PlanError(
            f"{call} starts processes, and each of them runs {main.__file__} again, line {line} as well, which would start "
            'processes without end. Put what starts there under `if __name__ == "__main__":`.'
        )


def _is_run_again(main: ModuleType) -> bool:
    """As `multiprocessing.spawn` decides it: a script or a module is, `python -m package` and a prompt are not."""
    if not getattr(main, "__file__", None):
        return False
    spec: Any = getattr(main, "__spec__", None)
    return spec is None or spec.name.rpartition(".")[2] != "__main__"


def _line_running(main: ModuleType) -> int | None:
    """The line of the main script's own code that this call came from; None: it came from elsewhere, as a thread's does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return None


def _source(main: ModuleType) -> ast.Module | None:
    try:
        with open(str(main.__file__), encoding="utf-8") as file:
            return ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):  # no script, or one that has changed since: it cannot be told
        return None


def _guarded(source: ast.Module | None, line: int) -> bool:
    if source is None:
        return True
    return any(_asks_who_runs(test) for test in _tests_around(source, line))


def _tests_around(source: ast.Module, line: int) -> Iterator[ast.expr]:
    """The conditions of the `if`s that `line` stands in."""
    for node in ast.walk(source):
        if isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or node.lineno):
            yield node.test


def _asks_who_runs(test: ast.expr) -> bool:
    """Whether it looks at the module's name, or at the process by one of the names that multiprocessing has for it."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    return bool(names & {"__name__", "parent_process", "current_process"})
