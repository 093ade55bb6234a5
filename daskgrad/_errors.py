"""The exceptions. Each is a `DaskgradError` and also the builtin that a user would catch.

They cross process borders: type, row, values and cause survive pickling, also where the cause itself cannot be pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping
from typing import Any

from ._names import shown

LONGEST = 8000  # characters: distributed replaces an exception whose text is longer than 10,000


class DaskgradError(Exception):
    """Base of every error that daskgrad raises on purpose.

    `label`, `partition` and `values` say which row it happened in, where it happened in a row.

    Attributes:
        label: the row's index label, or None.
        partition: the number of the row's partition, or None (pandas has none).
        values: the row function's arguments in that row, `{argument: cell}`.
    """

    # No defaults here: the wrapper that Dask's processes scheduler makes without tblib looks on the class first.
    label: Hashable
    partition: int | None
    values: Mapping[str, Any]

    def __init__(
        self,
        message: str,
        *,
        label: Hashable = None,
        partition: int | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.label, self.partition, self.values = label, partition, dict(values or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, _state(self)


class PlanError(DaskgradError, TypeError):
    """The call makes no sense as it stands: arguments and columns, a dtype, a wish, an unshippable function."""


class GraphError(DaskgradError, RuntimeError):
    """The path from argument to output is cut, absent, or was built elsewhere."""


class RowError(DaskgradError, RuntimeError):
    """The row function failed on a row; the user's own exception is `__cause__`."""


class StoreError(DaskgradError, OSError):
    """A folder of parts could not be completed: another writes there, the disk is full, a part takes too long or kills its process."""


class UsersOwn(Exception):
    """A PlanError that the row function raised, not daskgrad in it: a row that failed, as with any other exception. Never seen outside."""

    def __init__(self, error: PlanError) -> None:
        super().__init__(str(error))
        self.error = error


class EngineWarning(UserWarning):
    """It runs slower than it could, and why."""


def fit_to_travel(error: DaskgradError) -> DaskgradError:
    """A copy of `error` that any pickler can send; where it arrives its cause is the user's own exception again."""
    return _rebuild(*_state(error)).with_traceback(error.__traceback__)


def _state(error: DaskgradError) -> tuple[Any, ...]:
    """What `_rebuild` makes an error of again, all of it fit for a pickle."""
    values = {name: _picklable(value) for name, value in error.values.items()}
    shown = (_clipped(str(error)), _picklable(error.label), error.partition, values)
    return (type(error), *shown, carried(error.__cause__), getattr(error, "__notes__", None))


def _rebuild(
    kind: type[DaskgradError],
    message: str,
    label: Hashable,
    partition: int | None,
    values: Mapping[str, Any],
    cause: BaseException | None,
    notes: list[str] | None,
) -> DaskgradError:
    error = kind(message, label=label, partition=partition, values=values)
    error.__cause__ = cause
    for note in notes or ():
        error.add_note(note)
    return error


def _clipped(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " …"


def _picklable(value: Any) -> Any:
    """`value`, or its text where it does not survive a pickle."""
    return value if _survives(value) is not None else _clipped(shown(value))


def _survives(value: Any) -> bytes | None:
    """`value` as bytes, or None where they do not give one of its type back.

    cloudpickle and not pickle, as on every scheduler: a class made in a function or a notebook goes by value.
    """
    import cloudpickle  # comes with Dask; a pandas call never gets here

    try:
        blob: bytes = cloudpickle.dumps(value)
        again = pickle.loads(blob)
    except Exception:
        return None
    return blob if type(again) is type(value) else None


class _Carried(Exception):
    """A cause on its way: bytes that only the receiver opens, so that no class of the user's can stop the error."""

    def __init__(self, blob: bytes | None, text: str) -> None:
        super().__init__(text)
        self.blob = blob

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.blob, str(self))


def carried(cause: BaseException | None) -> _Carried | None:
    """An exception as what its own pickle, or the lack of one, cannot stop."""
    if cause is None or isinstance(cause, _Carried):
        return cause
    text = _clipped(f"{type(cause).__module__}.{type(cause).__qualname__}: {cause}")
    carried = _Carried(_survives(cause) or _survives(_Pieces(cause)), text)
    return carried.with_traceback(cause.__traceback__)


class _Pieces:
    """An exception whose own pickle fails, taken apart: class, args, and those attributes that can travel."""

    def __init__(self, cause: BaseException) -> None:
        self.kind, self.args = type(cause), tuple(_picklable(arg) for arg in cause.args)
        self.state = {name: _picklable(value) for name, value in vars(cause).items()}

    def joined(self) -> BaseException:
        """The exception again, without a call of an `__init__` that may want other arguments."""
        cause = self.kind.__new__(self.kind, *self.args)
        cause.args = self.args
        cause.__dict__.update(self.state)
        return cause


def _unpacked(blob: bytes | None, text: str) -> BaseException:
    """The user's exception, or a RuntimeError with its name and text where its class cannot be had here."""
    if blob is None:
        return RuntimeError(text)
    try:
        found = pickle.loads(blob)
        cause: BaseException = found.joined() if isinstance(found, _Pieces) else found
    except Exception:
        return RuntimeError(text)
    return cause
