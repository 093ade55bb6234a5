"""The notebooks run from a clean kernel, and what is stored is what a reader should see."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 300_000  # bytes of a file
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {ci!r})
import nbformat
from run_notebooks import executed
nbformat.write(executed(Path({path!r}), Path({folder!r})), {out!r})
"""


def test_there_are_notebooks() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[Path]]]:
    """Each notebook executed, two at a time, in processes of their own: a kernel's client keeps event loops and sockets."""
    with ThreadPoolExecutor(2) as pool:
        yield {path: pool.submit(executed, path, tmp_path_factory.mktemp(path.stem[:1])) for path in NOTEBOOKS}


def executed(path: Path, folder: Path) -> Path:
    out = folder / "executed.ipynb"
    inside = folder / "folder"
    inside.mkdir()
    code = RUN.format(ci=str(ROOT / "ci"), path=str(path), folder=str(inside), out=str(out))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return out


@pytest.mark.slow
@EACH
def test_a_clean_kernel_executes_it_and_shows_the_same_kinds_of_things(path: Path, runs: dict[Path, Future[Path]]) -> None:
    now = nbformat.read(runs[path].result(), as_version=4)
    clean(now)
    stored = nbformat.read(path, as_version=4)
    for cell, again in zip(code_cells(stored), code_cells(now), strict=True):
        assert kinds(cell) == kinds(again), (
            f"the outputs stored are of another run than of this source: ci/notebooks {path.stem[0]}\n{cell.source}"
        )


@EACH
def test_it_is_stored_with_outputs_that_anyone_may_see(path: Path) -> None:
    assert path.stat().st_size <= LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert notebook.cells[0].source.startswith("# ")
    assert any("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs), "no picture"
    clean(notebook)


def clean(notebook: Any) -> None:
    """No warning, no error, no path and no name of the machine that ran it."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", output
            assert output.get("name") != "stderr", output.text
            data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
            shown = json.dumps([output.get("text", ""), data])
            assert not re.search(r"/(root|home|tmp|usr|work|Users|var)/|Warning|0x[0-9a-f]{6}", shown), shown


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[Any]:
    """What a reader sees, one below the other; in how many messages a printed text came is the kernel's timing."""
    found = [sorted(output.data) if "data" in output else output.output_type for output in cell.outputs]
    return [kind for before, kind in zip([None, *found], found, strict=False) if (before, kind) != ("stream", "stream")]


CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in [
    "import dask.dataframe as dd, pandas as pd, daskgrad as dg; frame = pd.DataFrame({'x': [1.0]})",
    "def f(x):\\n    return x * float(x)",
    "try:\\n    dg.grad_column(frame, f)\\nexcept dg.GraphError as error:\\n    print(error)",
    "try:\\n    dg.grad_column(dd.from_pandas(frame, npartitions=1), f).compute()\\nexcept dg.GraphError as error:\\n    print(error)",
]:
    shell.run_cell(cell, store_history=True).raise_error()
"""


def test_an_error_calls_a_cell_as_the_reader_does_also_from_a_task(tmp_path: Path) -> None:
    environment = os.environ | {"IPYTHONDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=600, env=environment, check=True)
    assert ended.stdout.count("In[2]:2 `return x * float(x)`") == 2, ended.stdout
