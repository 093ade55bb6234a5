"""`verify`: some parts of a folder made again from their inputs, and compared with what lies there."""

from __future__ import annotations

import random

from dask.typing import Key

from ._complete import inputs_changed
from ._errors import PlanError, StoreError
from ._job import Job
from ._names import listing
from ._runner import Died
from ._task import Outcome


def sample(job: Job, rows: int | None, seed: int) -> list[int]:
    """The numbers of parts to make again, which hold at least `rows` rows, once all files are as they should be.

    Raises:
        StoreError: parts are missing, or their input has changed.
        PlanError: they are another result.
    """
    folder = job.folder
    parts, damaged = folder.parts()
    if damaged:
        raise StoreError(
            f"{len(damaged)} of {job.parts} parts in {folder.path} cannot be read: {listing(damaged, 10)}. to_parquet makes them."
        )
    there = {part.number: part for name, part in parts.items() if name == job.name(part.number)}
    missing = sorted(set(range(job.parts)) - there.keys())
    if missing:
        raise StoreError(f"{len(missing)} of {job.parts} parts are not in {folder.path}: {listing(missing, 10)}. to_parquet makes them.")
    other = [number for number, part in there.items() if part.identity["recipe"] != job.identity[number].recipe]
    if other:
        raise PlanError(
            f"{len(other)} of {job.parts} parts in {folder.path} are another result than what would be made now ({listing(other, 10)}): "
            "the code of the function, a module that it uses, or a shared argument has changed since."
        )
    changed = inputs_changed(job, list(there.values()))
    if changed:
        raise StoreError(f"the inputs of {len(changed)} of {job.parts} parts in {folder.path} have changed since: {listing(changed, 10)}")
    order = random.Random(seed).sample(range(job.parts), job.parts)
    chosen: list[int] = []
    while order and (rows is None or sum(there[number].rows for number in chosen) < rows):
        chosen.append(order.pop())
    job.schema = there[0].schema.remove_metadata()
    return sorted(chosen)


def compare(job: Job, numbers: list[int], tolerance: float) -> int:
    """Make these parts again and compare; the rows that were.

    Raises:
        StoreError: one differs.
        RowError, GraphError: one cannot be made.
    """
    found: dict[int, Outcome] = {}
    graph, keys = job.tasks(numbers, tolerance=tolerance)

    def come(key: Key, outcome: Outcome) -> None:
        found[outcome.number] = outcome

    try:
        job.runner.run(graph, list(keys), come)
    except Died:
        raise StoreError("a worker died while parts were made again: dg.to_parquet(..., isolate=True) tells which row does that") from None
    differing = [found[number] for number in numbers if found[number].status != "alike"]
    for outcome in differing:
        if outcome.error is not None:
            raise outcome.exception()
        raise StoreError(
            f"part {outcome.number} of {job.folder.path} is not what is made from its inputs now: {outcome.difference}. "
            f"{len(differing)} of {len(numbers)} parts that were made again differ.",
            partition=outcome.number,
        )
    return sum(outcome.rows for outcome in found.values())
