"""A part that is computed in a child process, and watched as if it were here.

Relay          in the parent: what the child tells of its parts goes where those of this thread would go
  _Relayed     one of the child's parts
tell_parent    in the child: where what it computes is told from now on
"""

from __future__ import annotations

from collections.abc import Callable

from . import _reporter
from ._reporter import Record, Reporter


class Relay:
    """Made in the thread that waits for the child, before the child begins.

    Attributes:
        asked: whether the child should tell anything; with it, whether the gradient page may want to know of results as well.
    """

    def __init__(self) -> None:
        self._post = _reporter.post()
        self._live: dict[str, _Relayed] = {}
        self.asked: bool | None = None if self._post is None else self._post.noting

    def heard(self, record: Record) -> None:
        """The child tells where one of its parts stands."""
        if self._post is None:
            return
        part = self._live.get(record["unit"])
        if part is None:
            part = self._live[record["unit"]] = _Relayed(record)
            self._post.begin(part)
        part.told(record)
        if part.state != "running":
            del self._live[record["unit"]]
            self._post.end(part)
        elif self._post.PERIODIC:
            self._post.tick(part)

    def lost(self) -> None:
        """The child has died."""
        for part in self._live.values():
            part.state = "failed"
            if self._post is not None:
                self._post.end(part)
        self._live.clear()


class _Relayed(Reporter):
    def __init__(self, record: Record) -> None:
        super().__init__(record["title"], record["call"], record["size"], record["of"], 1, None)
        self._record = record

    def told(self, record: Record) -> None:
        self._record, self.state = record, record["state"]

    def record(self) -> Record:
        return {**self._record, "unit": self.unit, "run": self.run, "group": self.group, "state": self.state}


class _ToParent:
    """Records as messages to the parent."""

    PERIODIC = True

    def __init__(self, tell: Callable[[Record], None], noting: bool) -> None:
        self._tell, self.noting = tell, noting

    def begin(self, reporter: Reporter) -> None:
        self._tell(reporter.record())

    tick = end = begin


def tell_parent(tell: Callable[[Record], None], asked: bool | None) -> None:
    """`tell` is given records of the parts that are computed here from now on, if that is `asked`."""
    _reporter.parent = None if asked is None else _ToParent(tell, asked)
