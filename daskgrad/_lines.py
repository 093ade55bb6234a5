"""The user's line in a message: file, line number and source, also where a function has travelled.

cloudpickle takes the file's name out of the functions that it sends by value; it travels beside the plan instead. A
notebook's cell has a file too, of which nobody has heard: it is called as IPython calls it, `In[3]`.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ._captured import reachable

if TYPE_CHECKING:
    from ._plan import Plan

Code = tuple[str, int, bytes]  # name, first line and bytecode tell which code it is, wherever it runs
File = tuple[str, str]  # its name, and what a reader calls it

_NO_FILE = "<dynamic-code>"
_files: dict[Code, File] = {}


def files_of(plan: Plan) -> dict[Code, File]:
    """The file of each function in reach of the row function of `plan`."""
    found = (value.__code__ for _, value in reachable(plan) if isinstance(value, types.FunctionType))
    return {_identity(code): (code.co_filename, _called(code.co_filename)) for top in found for code in _nested(top)}


def arrived(files: Mapping[Code, File]) -> None:
    """Functions from `files` run in this process from now on."""
    _files.update(files)


def file_of(name: str, line: int) -> str:
    """The file of the function called `name` that has travelled here and has this line."""
    near = {first: called for (code, first, _), (_, called) in _files.items() if code == name and first <= line}
    return near[max(near)] if near else _NO_FILE


def users_line() -> str:
    """File, line and source of the innermost frame that is neither torch's nor daskgrad's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_inside()):
        frame = frame.f_back
    return told(frame.f_code, frame.f_lineno, frame.f_globals)


def told(code: types.CodeType, number: int, module: Mapping[str, object]) -> str:
    """A line of `code`, whose globals are `module`: its file, its number and its source."""
    file = code.co_filename
    called = _called(file)
    if file == _NO_FILE:
        file, called = _files.get(_identity(code), (file, called))
    source = linecache.getline(file, number, dict(module)).strip()
    return f"{called}:{number}" + (f" `{source}`" if source else "")


def line_of(error: BaseException) -> str:
    """File, line and source where the user's code raised `error`, or called what did; empty where no code of his is among the calls.

    Of his calls the innermost outside of installed packages, else the innermost that is neither torch's nor daskgrad's.
    """
    found: tuple[types.CodeType, int, Mapping[str, object]] | None = None
    own = False
    step = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith(_inside()) and not file.startswith("<frozen"):
            installed = file.startswith(_installed())
            if not installed or not own:
                found, own = (step.tb_frame.f_code, step.tb_lineno, step.tb_frame.f_globals), not installed
        step = step.tb_next
    return "" if found is None else told(*found)


def at_line(error: BaseException) -> str:
    """`, at file:line` and the source, where there is one to tell."""
    line = line_of(error)
    return f", at {line}" if line else ""


def _called(file: str) -> str:
    """`In[3]` for the file of a notebook's cell, in the process of the notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = None if shell is None else shell.compile.format_code_name(file)
    return file if cell is None else cell[1]


@functools.cache
def _inside() -> tuple[str, ...]:
    """The folders of daskgrad and torch."""
    torch = importlib.util.find_spec("torch")
    files = [__file__] if torch is None or torch.origin is None else [__file__, torch.origin]
    return tuple(os.path.dirname(file) + os.sep for file in files)


@functools.cache
def _installed() -> tuple[str, ...]:
    """The folders of Python's own modules and of installed packages."""
    found = sysconfig.get_paths()
    return tuple(found[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _identity(code: types.CodeType) -> Code:
    return code.co_name, code.co_firstlineno, code.co_code


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
