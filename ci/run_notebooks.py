"""Executes notebooks in place, each in a clean kernel; what `ci/notebooks` runs, and the tests use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
TIMEOUT = 300  # seconds for one cell


def executed(path: Path, folder: Path) -> Any:
    """The notebook at `path` with the outputs of a run in `folder`, and nothing in it that changes with the clock.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        config=Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}}),  # files, not ports for all
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


@click.command()
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Execute the notebooks whose names hold one of NAMES, or all."""
    import tempfile

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and not any(name in path.name for name in names):
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        nbformat.write(notebook, path)
        click.echo(f"{path.name}: {time.perf_counter() - started:.1f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
