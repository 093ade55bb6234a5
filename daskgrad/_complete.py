"""A run of `to_parquet`: what is there and may stay, and all else made, until every part lies in its folder.

complete       the whole run, under the folder's lock
  sorted_out     parts that are there and are what would be made: by their footers, before any work
  _settle        column types that only cells tell, from the first parts
  _make          all other parts at once; those whose process died again, each in a process of its own
  _raise         what failed, by partition and row
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Collection as Several
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from dask.typing import Key

from . import _task, _write
from ._errors import PlanError, StoreError
from ._folder import Part
from ._job import Job
from ._names import listing
from ._runner import Died
from ._task import Outcome

_RECORD = 2**26  # bytes: how parts are made is kept for `verify` where it is no more, so not where it holds a large pandas frame
_TRIES = 5  # times that a pool of processes may die before every part goes in a process of its own


@dataclass
class Run:
    """A job under way.

    Attributes:
        kept: parts that were there.
        written: parts made now.
        failed: parts that could not be made.
        untyped: parts in which some column is missing throughout, while no cell of another part has told its type.
        died: parts over which a worker has died; they go again, each in a process of its own.
    """

    job: Job
    kept: dict[int, Part] = field(default_factory=dict)
    written: dict[int, Outcome] = field(default_factory=dict)
    failed: dict[int, Outcome] = field(default_factory=dict)
    untyped: set[int] = field(default_factory=set)
    died: set[int] = field(default_factory=set)


def complete(job: Job) -> Run:
    """Make every part that is not there.

    Raises:
        PlanError: what is there is another result, and `on_change` is "refuse".
        StoreError: a full disk, a part that kills its process or takes too long, or somebody else who writes here.
        RowError, GraphError and whatever else a part raised: the first of them by number; all other parts are written.
    """
    folder, run = job.folder, Run(job)
    folder.make()
    with folder.locked():
        there, damaged = folder.parts()
        stale = damaged + sorted_out(run, there)
        run.died = set(folder.interrupted()) - run.kept.keys()
        missing = [number for number in range(job.parts) if number not in run.kept]
        folder.remove(stale)
        if missing:
            folder.begin(job.digest())
            try:
                _make_all(run, missing)
            except KeyboardInterrupt:
                folder.interrupted()  # by the user: none of the parts under way is suspected of anything
                raise
        if not run.failed:
            _record(job)
            folder.end()
    return run


def part_done(run: Run, outcome: Outcome) -> None:
    """A part lies in its folder. The one place in the caller's process that learns of it: progress is shown from here."""
    run.written[outcome.number] = outcome
    run.failed.pop(outcome.number, None)


def _record(job: Job) -> None:
    """How it is made, for `verify`; without the data itself where that is large, or no other process could open it."""
    import cloudpickle

    try:
        data = cloudpickle.dumps((job.wishes, job.collection))
    except (TypeError, pickle.PicklingError):
        data = b""
    job.folder.record("recipe", data if 0 < len(data) <= _RECORD else cloudpickle.dumps((job.wishes, None)))


# -------------------------------------------------------------------------------- what is there


def sorted_out(run: Run, there: dict[str, Part]) -> list[str]:
    """Note the parts that may stay; the names of those that go.

    Raises:
        PlanError: what is there is another result, and `on_change` is "refuse".
    """
    job = run.job
    if not job.wishes.resume:
        return list(there)
    alike: list[Part] = []
    gone: list[str] = []
    other: list[tuple[Part, str]] = []
    recipes = {one.recipe for one in job.identity} - {None}
    for name, part in there.items():
        mine = part.number < job.parts and name == job.name(part.number)
        if part.identity["recipe"] not in ({job.identity[part.number].recipe} - {None} if mine else recipes):
            other.append((part, "result"))
        elif job.wishes.environment == "same" and job.environment not in (None, part.identity["environment"]):
            other.append((part, "environment"))
        elif mine:
            alike.append(part)
        else:
            gone.append(name)  # of a partition that is no more
    if other and job.wishes.on_change == "refuse":
        raise PlanError(_another(job, *other[0], len(other), len(there)))
    changed = inputs_changed(job, alike)
    run.kept = {part.number: part for part in alike if part.name not in changed}
    for part in run.kept.values():
        job.learn({name: kind for name in _write.open_columns(job.schema) if (kind := part.schema.field(name).type) != pa.null()})
    return [*gone, *changed, *[part.name for part, _ in other]]


def inputs_changed(job: Job, parts: list[Part]) -> list[str]:
    """The names of those whose inputs are others now. Inputs that only their content tells are looked at."""
    digests = {part.number: list(job.identity[part.number].inputs) for part in parts}
    unknown = [number for number, inputs in digests.items() if None in inputs]

    def told(key: Key, found: list[Any]) -> None:
        for place, digest in zip(job.identity[keys[key]].open, found, strict=True):
            digests[keys[key]][place] = digest

    if unknown:
        graph, keys = job.checks(unknown)
        job.runner.run(graph, list(keys), told)
    now = {number: _task.together(inputs) for number, inputs in digests.items()}
    return [part.name for part in parts if now[part.number] is None or part.identity["inputs"] != now[part.number]]


def _another(job: Job, part: Part, what: str, others: int, there: int) -> str:
    identity = part.identity
    said = f"{others} of {there} parts in {job.folder.path}"
    if what == "environment":
        here, then = job.environment or {}, identity["environment"]
        names = [name for name in {**here, **then} if here.get(name) != then.get(name)]
        told = ", ".join(f"{name} {then.get(name)} there, {here.get(name)} now" for name in names)
        return (
            f"{said} were made in another environment ({told}), and their last bits may differ. "
            'Possible: environment="any" keeps them, on_change="recompute" makes them again, another path leaves them alone.'
        )
    was, now = [_in_words(plans) for plans in (identity["derivatives"], job.identities.plans)]
    more = "" if was != now else " They have the same names, so the code, a shared argument, an option or a step around them has changed."
    if job.identities.unstable:
        more = f" What is asked for cannot be known again, since it holds {job.identities.unstable[0]}."
    return (
        f"{said} are another result: they hold {was}, and what is asked for is {now}.{more} "
        'Possible: another path; on_change="recompute" removes them and makes all anew.'
    )


def _in_words(plans: list[Any]) -> str:
    return ", ".join(f"{plan['function']}: {listing(plan['columns'])}" for plan in plans) or "no derivative"


# -------------------------------------------------------------------------------- the work


class _Stopped(Exception):
    """A part has failed, and no other is to be begun."""


def _make_all(run: Run, missing: list[int]) -> None:
    """Parts over which a worker died come last, by themselves."""
    try:
        todo = _settle(run, [number for number in missing if number not in run.died])
        _make(run, todo)
        _make(run, sorted(run.died & set(missing)), isolate=True)
        if run.untyped:
            _settle_missing(run)
    except _Stopped:
        _raise(run)
    if run.failed and run.job.wishes.on_failure != "report":
        _raise(run)


def _settle(run: Run, numbers: list[int]) -> list[int]:
    """Until the type of every column is known, part after part; the numbers of those that are left."""
    left = list(numbers)
    while left and _write.open_columns(run.job.schema):
        _make(run, [left.pop(0)])
    return left


def _settle_missing(run: Run) -> None:
    """Parts with columns that were missing throughout: with the types of the others, or, where nobody knows one, as text."""
    run.job.learn(dict.fromkeys(_write.open_columns(run.job.schema), pa.large_string()))
    numbers, run.untyped = sorted(run.untyped), set()
    _make(run, numbers)


def _make(run: Run, numbers: list[int], isolate: bool = False) -> None:
    """Make these parts. Those over which a worker has died are left in `run.died`."""
    job, left, deaths = run.job, set(numbers), 0
    how = {"isolate": True} if isolate else {}

    def come(key: Key, outcome: Outcome) -> None:
        left.discard(outcome.number)
        _take(run, outcome)

    while left:
        graph, keys = job.tasks(sorted(left), **how)
        try:
            job.runner.run(graph, list(keys), come)
        except Died as death:
            deaths += 1
            gone = set(job.folder.interrupted()) & left if death.keys is None else {keys[key] for key in death.keys}
            gone = gone if deaths <= _TRIES and not isolate else set(left)
            left -= gone
            if isolate:
                _lost(run, gone)
            else:
                run.died |= gone


def _lost(run: Run, numbers: Several[int]) -> None:
    for number in numbers:
        problem = StoreError(
            f"the worker that held partition {number} died, though that part ran in a process of its own: look into the worker's log, and "
            "at its memory limit",
            partition=number,
        )
        run.failed[number] = Outcome(number, "failed", error=_task.packed(problem))


def _take(run: Run, outcome: Outcome) -> None:
    run.job.learn(outcome.types or {})
    if outcome.status == "written":
        _check_environment(run.job, outcome)
        part_done(run, outcome)
    elif outcome.status == "untyped":
        run.untyped.add(outcome.number)
    elif outcome.status == "superseded":
        raise StoreError(f"another job has begun to write {run.job.folder.path}: this one stops")
    else:
        run.failed[outcome.number] = outcome
        if outcome.fatal or run.job.wishes.on_failure == "stop":
            raise _Stopped


def _check_environment(job: Job, outcome: Outcome) -> None:
    job.environment = job.environment or outcome.environment
    if job.wishes.environment == "same" and outcome.environment != job.environment:
        raise PlanError(
            f"part {outcome.number} was made in another environment ({outcome.environment}) than the others ({job.environment}): a worker "
            'that joined later is not like the rest. Make them alike, or accept it: environment="any".'
        )


def _raise(run: Run) -> None:
    """The first failure by number, with what became of the rest."""
    job, numbers = run.job, sorted(run.failed)
    fatal = [number for number in numbers if run.failed[number].fatal]
    number = (fatal or numbers)[0]
    error = run.failed[number].exception()
    lying = sum(1 for _ in job.folder.path.iterdir())  # also parts that were under way when another failed
    told = f"{lying} of {job.parts} parts lie whole in {job.folder.path}; run it again to make only the rest."
    if fatal:
        free = shutil.disk_usage(job.folder.path).free
        problem = f"the disk of {job.folder.path} takes no more: {error} ({free / 1e6:.1f} MB free). {told}"
        raise StoreError(problem, partition=number) from error
    error.add_note(f"daskgrad: this is partition {number}; {len(numbers)} of {job.parts} failed ({listing(numbers, 10)}). {told}")
    raise error
