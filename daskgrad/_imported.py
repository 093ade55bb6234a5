"""`FILE.py:function` and `package.module:function` as what they name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ._errors import PlanError
from ._names import listing, nearest


def named(text: str) -> Any:
    """What `text` names: an attribute (dots go deeper) of a Python file or of a module that can be imported.

    A file is loaded as a module of its own, with its folder where its imports are looked up; it travels to workers by value.

    Raises:
        PlanError: there is no such file, module or name, or loading it failed.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise PlanError(f"{text!r} names no function. Possible: FILE.py:function, or package.module:function.")
    found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
    for step in name.split("."):
        if not hasattr(found, step):
            there = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise PlanError(f"{place} has no {name!r}. It has {listing(there)}.{nearest(step, there)}")
        found = getattr(found, step)
    return found


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        others = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise PlanError(f"there is no file {path}.{nearest(str(path), others)}")
    import cloudpickle

    name = path.stem if path.stem not in sys.modules else f"{path.stem}_file"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PlanError(f"{path} cannot be loaded{_where(error, path)}: {type(error).__name__}: {error}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise PlanError(f"the module {name} cannot be imported: {type(error).__name__}: {error}") from error


def _where(error: BaseException, path: Path) -> str:
    """The line of `path` that the error comes from."""
    if isinstance(error, SyntaxError):
        return ""  # it says so itself
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())]
    return f", line {lines[-1]}" if lines else ""
