"""`daskgrad grad` and `daskgrad explain`, as a person runs them, and what they read and write."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import daskgrad as dg
from daskgrad import _input, _spec
from daskgrad._cli import main

MODEL = '''
"""Row functions of the tests."""
import torch

from beside import FACTOR

weights = torch.tensor([1.0, -1.0], dtype=torch.float64)


def power(x, y, scale=2.0):
    return scale * x**3 * y


def signed(x, y, kind):
    return x**2 * y if kind == "call" else -x


def bowl(z):
    return (z**2).sum()


def weighed(z, weights):
    return (weights * z).sum()


def strict(x, n):
    if n == 7:
        raise ValueError("not\\nthis one")
    return x**2


def root(x):
    return torch.sqrt(x - 1)


def cut(x):
    return float(x) * 2


number = 3
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table as Parquet and CSV, and a file of row functions that imports another one beside it."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "beside.py").write_text("FACTOR = 1\n")
    monkeypatch.chdir(tmp_path)
    for name in ("model", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    frame = book()
    frame.to_csv("book.csv", index=False)
    frame.to_parquet("book.parquet", index=False, row_group_size=5)
    return tmp_path


def book() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(1, 2, size=(2, 20))
    return pd.DataFrame({"n": range(20), "x": x, "y": y, "kind": ["call", "put"] * 10, "odd name": x})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


def done(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def failed(code: int, *arguments: str) -> str:
    """The one line that a call which fails prints, after how far it came, and nothing else."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    *progress, line = result.stderr.splitlines()
    assert all(" rows · " in how_far for how_far in progress), progress
    return line


def read(out: str) -> pd.DataFrame:
    return pd.read_csv(out) if out.endswith(".csv") else pd.read_parquet(out).reset_index(drop=True)


# --- what it computes


@pytest.mark.parametrize("source", ["book.parquet", "book.csv"])
@pytest.mark.parametrize("out", ["out.parquet", "out.csv", "new/folder/out.csv"])
def test_the_table_comes_back_with_the_gradient(source: str, out: str) -> None:
    said = done("grad", source, "model.py:power", "--wrt", "x", "--out", out).stdout
    frame = book().assign(d_x=lambda df: 6 * df.x**2 * df.y)
    pd.testing.assert_frame_equal(read(out), frame, check_dtype=False, rtol=1e-12)
    assert said.startswith("20 rows in ")
    assert out in said
    assert f"{frame.d_x.min():.6g} to {frame.d_x.max():.6g}, mean {frame.d_x.mean():.6g}" in said
    assert not list(Path(out).parent.glob("*.part*")), "nothing is left beside a file"


def test_several_by_name_in_one_pass_and_without_the_table() -> None:
    specs = {"value": "value", "gamma": "x,x", "cross": "x, y", "length": "norm(x, y)", "along": "dot(x, y)", "why": "problem"}
    options = [text for name, spec in specs.items() for text in ("--derivative", f"{name}={spec}")]
    done("grad", "book.parquet", "model.py:power", "--wrt", "y", *options, "--only", "--out", "o.parquet")
    wanted = {"d_y": "y", "value": (), "gamma": ("x", "x"), "cross": ("x", "y"), "length": dg.norm(["x", "y"]), "along": dg.dot("x", "y")}
    expected = dg.derivatives(book(), lambda x, y: 2 * x**3 * y, {**wanted, "why": dg.problem})
    pd.testing.assert_frame_equal(read("o.parquet"), expected, check_dtype=False, rtol=1e-12)


def test_the_first_argument_is_the_default_and_keep_chooses_columns() -> None:
    done("grad", "book.csv", "model.py:signed", "--keep", "n", "--out", "o.csv")
    frame = book()
    expected = np.where(frame.kind == "call", 2 * frame.x * frame.y, -1.0)
    assert read("o.csv").columns.tolist() == ["n", "d_x"]
    np.testing.assert_allclose(read("o.csv").d_x, expected, rtol=1e-12)


@pytest.mark.parametrize("value", ["z=x,y", 'z="x",y', "z=[xy]"])
def test_inputs_stack_columns(value: str) -> None:
    done("grad", "book.parquet", "model.py:bowl", "--input", value, "--wrt", "z", "--only", "--out", "o.parquet")
    np.testing.assert_allclose(read("o.parquet")[["d_x", "d_y"]], 2 * book()[["x", "y"]], rtol=1e-12)


def test_inputs_of_one_column_and_shared_arguments() -> None:
    call = ["grad", "book.parquet", "model.py:power", "--input", "x=odd name", "--shared", "scale=5", "--wrt", "x", "--only", "--out"]
    done(*call, "o.parquet")
    np.testing.assert_allclose(read("o.parquet")["d_odd name"], 15 * book().x ** 2 * book().y, rtol=1e-12)
    call = ["grad", "book.parquet", "model.py:weighed", "--input", "z=x,y", "--shared", "weights=model.py:weights", "--only", "--out"]
    done(*call, "p.parquet")
    assert read("p.parquet")[["d_x", "d_y"]].drop_duplicates().to_numpy().tolist() == [[1.0, -1.0]]


def test_a_function_of_a_module() -> None:
    done("grad", "book.parquet", "torch.special:expm1", "--input", "input=x", "--only", "--out", "e.parquet")
    np.testing.assert_allclose(read("e.parquet").d_x, np.exp(book().x), rtol=1e-12)
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/inner.py").write_text("class Model:\n    @staticmethod\n    def square(x):\n        return x**2\n")
    done("grad", "book.parquet", "package.inner:Model.square", "--only", "--out", "o.parquet")
    np.testing.assert_allclose(read("o.parquet").d_x, 2 * book().x, rtol=1e-12)


def test_a_missing_value_in_a_csv_is_missing_in_the_result_and_counted() -> None:
    Path("gaps.csv").write_text("x,y\n1.5,1\n,1\n2,\n1,3\n")
    said = done("grad", "gaps.csv", "model.py:power", "--out", "o.csv").stdout
    assert Path("o.csv").read_text().splitlines() == ["x,y,d_x", "1.5,1,13.5", ",1,", "2.0,,", "1.0,3,18.0"]
    assert "2 missing" in said


def test_gradients_that_are_not_finite_are_counted() -> None:
    Path("edge.csv").write_text("x\n1.0\n1.25\n")
    assert "1 not finite" in done("grad", "edge.csv", "model.py:root", "--out", "o.csv").stdout


def test_without_out_the_first_rows_are_shown() -> None:
    result = done("grad", "book.csv", "model.py:power")
    assert len(result.stdout.splitlines()) == 11
    assert "d_x" in result.stdout
    assert "--out" in result.stderr
    assert sorted(path.name for path in Path().iterdir() if "__" not in path.name) == ["beside.py", "book.csv", "book.parquet", "model.py"]


def test_options_reach_the_call() -> None:
    call = ["grad", "book.parquet", "model.py:strict", "--wrt", "x", "--out", "o.parquet"]
    said = done(*call, "--on-error", "null", "--engine", "loop", "--dtype", "float64", "--batch-size", "3").stdout
    assert "1 missing" in said
    assert read("o.parquet").index[read("o.parquet").d_x.isna()].tolist() == [7]


def test_progress_goes_to_stderr_and_quiet_says_nothing() -> None:
    call = ["grad", "book.parquet", "model.py:power", "--wrt", "x"]
    loud = done(*call, "--out", "loud.parquet")
    assert "20 of 20 rows" in loud.stderr.splitlines()[-1]
    assert "20 rows in" in loud.stdout
    quiet = done(*call, "--out", "quiet.parquet", "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_an_engine_warning_is_one_line() -> None:
    Path("slow.py").write_text(
        "import torch\n\nclass Square(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(x)\n        return x**2\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return 2 * ctx.saved_tensors[0] * g\n\n"
        "def f(x):\n    return Square.apply(x)\n"
    )
    result = done("grad", "book.parquet", "slow.py:f", "--out", "o.parquet")
    line, *_ = result.stderr.splitlines()
    assert line.startswith("Warning: f: rows go one by one")


# --- which rows


CONDITIONS = [
    "x < 1.5",
    "1.2 < x <= 1.8 and kind == 'call'",
    "kind == 'put' or y > 1.9",
    "kind in ['call'] and n >= 3",
    "not (n == 4)",
    "`odd name` > 1.5",
    "x + y > 3",
    "n > 1000",
    "(3 < n) & (n != 5)",
]


@pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # Dask's own reader, under pandas 3.1
@pytest.mark.parametrize("source", ["book.parquet", "book.csv"])
@pytest.mark.parametrize("where", CONDITIONS)
def test_where_means_what_pandas_means(source: str, where: str) -> None:
    found = _input.table(source, where).compute().reset_index(drop=True)
    pd.testing.assert_frame_equal(found, book().query(where).reset_index(drop=True), check_dtype=False)


@pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")
def test_where_is_left_to_the_reader_as_far_as_it_understands() -> None:
    frame = _input.table("book.parquet", "n < 5 and x + y > 0")
    filters = {str(node.operand("filters")) for node in frame.expr.walk() if "filters" in type(node)._parameters}
    assert filters == {"[[('n', '<', 5)]]"}
    read = [list(leaf.operand("columns")) for leaf in frame[["kind"]].optimize(fuse=False).expr.find_operations(_reader(frame))]
    assert read
    assert all(set(columns) <= {"n", "x", "y", "kind"} for columns in read)


def _reader(frame: Any) -> type:
    return type(next(node for node in frame.expr.walk() if "filters" in type(node)._parameters))


def test_rows_that_are_filtered_away_are_never_differentiated() -> None:
    done("grad", "book.csv", "model.py:strict", "--wrt", "x", "--where", "n != 7", "--out", "o.csv")
    assert len(read("o.csv")) == 19
    assert "no row" not in done("grad", "book.csv", "model.py:power", "--where", "n > 99", "--out", "p.csv").stdout
    assert Path("p.csv").read_text() == "n,x,y,kind,odd name,d_x\n"


def test_an_unknown_value_fulfils_no_condition() -> None:
    Path("gaps.csv").write_text("x,y\n1.5,1\n,1\n2,4\n")
    assert len(_input.table("gaps.csv", "x != 2")) == 1


@pytest.mark.parametrize(
    ("where", "says"),
    [("price > 1", "The columns: 'n', 'x'"), ("x >", "--where 'x >'"), ("x + 1", "true or false"), ("kind < 3", "comparison")],
)
def test_a_condition_that_makes_no_sense_is_refused(where: str, says: str) -> None:
    assert says in failed(2, "grad", "book.csv", "model.py:power", "--where", where)


# --- where from


def test_folders_globs_and_compressed_files() -> None:
    for folder in ("csv", "parquet"):
        Path(folder).mkdir()
    for number in range(3):
        part = book().iloc[7 * number : 7 * number + 7]
        part.to_csv(f"csv/{number}.csv", index=False)
        part.to_parquet(f"parquet/{number}.parquet", index=False)
    book().to_csv("whole.csv.gz", index=False)
    book().to_csv("tabs.tsv", index=False, sep="\t")
    book().to_csv("german.csv", index=False, sep=";")
    for source in ("csv", "csv/*.csv", "parquet", "parquet/?.parquet", "whole.csv.gz", "tabs.tsv"):
        done("grad", source, "model.py:power", "--only", "--overwrite", "--out", "o.parquet")
        np.testing.assert_allclose(read("o.parquet").d_x, 6 * book().x ** 2 * book().y, rtol=1e-12, err_msg=source)
    done("grad", "german.csv", "model.py:power", "--separator", ";", "--only", "--overwrite", "--out", "o.parquet")
    assert len(read("o.parquet")) == 20


def test_more_than_nine_parts_keep_their_order() -> None:
    Path("many").mkdir()
    for number in range(12):
        pd.DataFrame({"x": [float(number)], "y": 1.0}).to_csv(f"many/{number:02}.csv", index=False)
    done("grad", "many", "model.py:power", "--out", "o.csv")
    assert read("o.csv").x.tolist() == list(range(12))


def test_an_index_with_a_name_stays() -> None:
    book().set_index("kind").to_parquet("indexed.parquet")
    done("grad", "indexed.parquet", "model.py:power", "--out", "o.parquet")
    assert pd.read_parquet("o.parquet").index.name == "kind"
    done("grad", "indexed.parquet", "model.py:power", "--out", "o.csv")
    assert read("o.csv").columns[0] == "kind"


def test_a_csv_column_that_goes_on_otherwise_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_input, "SAMPLE", 100)
    Path("trap.csv").write_text("x,y\n" + "1,2\n" * 100 + "1.5,2\n")
    line = failed(1, "grad", "trap.csv", "model.py:power", "--out", "o.csv")
    assert "--column 'x=double[pyarrow]'" in line
    done("grad", "trap.csv", "model.py:power", "--column", "x=double[pyarrow]", "--overwrite", "--out", "o.csv")
    assert read("o.csv").d_x.iloc[-1] == 27.0


@pytest.mark.parametrize("options", [[], ["--column", "x=float64"]])
def test_a_cell_that_is_no_number_is_found(options: list[str]) -> None:
    Path("odd.csv").write_text("x,y\n" + "1.5,2\n" * 100 + "n/a?,2\n" + "2.5,2\n" * 100)
    line = failed(1, "grad", "odd.csv", "model.py:power", *options, "--out", "o.csv")
    assert "odd.csv: the column 'x' holds 'n/a?' in row 101 (the first is 1), and numbers elsewhere. --missing 'n/a?' takes" in line
    done("grad", "odd.csv", "model.py:power", "--missing", "n/a?", "--out", "o.csv", "--overwrite")
    assert read("o.csv").d_x.isna().tolist() == [place == 100 for place in range(201)]


def test_a_null_in_parquet_is_a_missing_value_and_nan_is_a_number() -> None:
    cells = pa.array([1.0, None, math.nan])
    pq.write_table(pa.table({"x": cells, "y": [1.0, 1.0, 1.0]}), "gaps.parquet")
    Path("other.py").write_text("import torch\n\ndef f(x, y):\n    return torch.where(x.isnan(), 2.0, x) * y\n")
    done("grad", "gaps.parquet", "other.py:f", "--wrt", "y", "--only", "--out", "o.parquet")
    assert pq.read_table("o.parquet")["d_y"].to_pylist() == [1.0, None, 2.0]
    assert read("o.parquet").d_y.dtype == "double[pyarrow]"
    done("grad", "book.parquet", "model.py:power", "--only", "--out", "p.parquet")
    assert read("p.parquet").d_x.dtype == "float64"


BROKEN: dict[str, tuple[str, list[str], str]] = {
    "no rows": ("x,y\n", [], "has a header and no rows"),
    "nothing": ("", [], "cannot be read as CSV: No columns to parse from file"),
    "another separator": ("x;y\n1;2\n", [], "--separator ';' says so"),
    "an open quote": ('x,y\n1,2\n"3,4\n5,6\n', [], "A quotation mark may not be closed"),
    "a wide line": ("x,y\n1,2\n3,4,5\n", [], "Expected 2 fields in line 3, saw 3"),
    "gaps among integers": ("x,y\n1,2\n3,\n", ["--column", "y=int64"], "--column 'y=Int64' can"),
    "no such column": ("x,y\n1,2\n", ["--column", "yy=int64"], "--column yy=…: there is no such column. The columns: 'x', 'y'"),
    "text": ("x,y\na,2\nb,3\n", [], "cannot be differentiated: it holds text."),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_csv_file_that_cannot_be_used_says_why(name: str) -> None:
    text, options, says = BROKEN[name]
    Path("broken.csv").write_text(text)
    result = run("grad", "broken.csv", "model.py:power", *options, "--out", "o.csv")
    assert result.exit_code in (1, 2)
    assert says in result.stderr
    assert "dask.config" not in result.stderr
    assert "sample_rows" not in result.stderr


def test_a_file_that_lacks_a_column_is_named() -> None:
    Path("part-1.csv").write_text("x,y\n1,2\n")
    Path("part-2.csv").write_text("x,z\n1,2\n")
    line = failed(2, "grad", "part-*.csv", "model.py:power", "--out", "o.csv")
    assert line == "Error: part-2.csv has no column 'y', which part-1.csv has. Its columns: 'x', 'z'."


@pytest.mark.parametrize("data", [b"", b"PAR1junk", b"x,y\n1,2\n"])
def test_a_parquet_file_that_is_none_says_so(data: bytes) -> None:
    Path("broken.parquet").write_bytes(data)
    assert "broken.parquet cannot be read as Parquet: " in failed(2, "grad", "broken.parquet", "model.py:power")


def test_a_glob_without_quotes_is_recognised() -> None:
    result = run("grad", "book.csv", "book.parquet", "model.py:power")
    assert result.exit_code == 2
    assert "A glob goes in quotes" in result.stderr


def test_remedies_are_options() -> None:
    Path("other.py").write_text("def f(spott):\n    return spott**2\n\ndef g(x, spott):\n    return x * spott\n")
    assert "--input spott=COLUMN or --shared spott=VALUE" in failed(2, "grad", "book.csv", "other.py:g")
    assert "--on-error null" in failed(1, "grad", "book.csv", "model.py:strict", "--wrt", "x", "--out", "o.csv")
    said = done("grad", "book.csv", "model.py:strict", "--wrt", "x", "--out", "o.csv", "--on-error", "null", "--overwrite").stderr
    assert "--derivative problem=problem says which, and why" in said


# --- what is refused


REFUSED: list[tuple[list[str], str]] = [
    (["bok.csv", "model.py:power"], "no file bok.csv. Did you mean 'book.csv'?"),
    (["*.json", "model.py:power"], "no file matches"),
    ([".", "model.py:power"], "Parquet and CSV"),
    (["model.py", "model.py:power"], "ends neither in"),
    (["book.csv", "model.py"], "names no function"),
    (["book.csv", "modle.py:power"], "Did you mean 'model.py'?"),
    (["book.csv", "model.py:powr"], "Did you mean 'power'?"),
    (["book.csv", "model.py:number"], "is no function: it is"),
    (["book.csv", "nowhere.at.all:f"], "cannot be imported"),
    (["book.csv", "broken.py:f"], "broken.py cannot be loaded, line 3: NameError"),
    (["book.csv", "unfinished.py:f"], "SyntaxError"),
    (["book.csv", "model.py:power", "--wrt", "z"], "'z'"),
    (["book.csv", "model.py:power", "--wrt", "x,x"], "--derivative 'name=x,x'"),
    (["book.csv", "model.py:power", "--wrt", "kind"], "kind"),
    (["book.csv", "model.py:power", "--derivative", "gamma"], "NAME=VALUE"),
    (["book.csv", "model.py:power", "--derivative", "g=x+1"], "'x+1' is no derivative. Possible: value; x;"),
    (["book.csv", "model.py:power", "--derivative", "y=x"], "a column 'y' already"),
    (["book.csv", "model.py:power", "--derivative", "a=x", "--derivative", "a=y"], "there twice"),
    (["book.csv", "model.py:power", "--input", "x=xx"], "no column 'xx'"),
    (["book.csv", "model.py:power", "--keep", "z"], "--keep z"),
    (["book.parquet", "model.py:power", "--column", "x=float32"], "for CSV"),
    (["book.csv", "model.py:bowl", "--input", "z=x,y", "--derivative", "g=z", "--out", "o.csv"], "holds arrays"),
    (["book.csv", "model.py:power", "--out", "o.xlsx"], "ends in .xlsx"),
    (["book.csv", "model.py:power", "--out", "-"], "not into a pipe"),
    (["book.csv", "model.py:power", "--out", "book.csv"], "is what is read: writing there would destroy it"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_call_that_makes_no_sense_says_so_in_one_line(arguments: list[str], says: str) -> None:
    Path("broken.py").write_text("import torch\n\nf = missing\n")
    Path("unfinished.py").write_text("def f(x:\n")
    before = book().to_csv(index=False)
    line = failed(2, "grad", *arguments)
    assert line.startswith("Error: ")
    assert says in line
    assert Path("book.csv").read_text() == before


def test_what_is_there_is_replaced_only_if_asked() -> None:
    call = ["grad", "book.csv", "model.py:power", "--out"]
    done(*call, "o.parquet")
    assert "--overwrite replaces it, --resume continues it" in failed(2, *call, "o.parquet")
    done(*call, "o.parquet", "--overwrite", "--wrt", "y")
    assert "d_y" in read("o.parquet")
    Path("mine").mkdir()
    Path("mine/letter.txt").touch()
    assert "letter.txt" in failed(2, *call, "mine", "--overwrite")
    assert Path("mine/letter.txt").exists()


@pytest.mark.parametrize("flag", [[], ["--overwrite"], ["--resume"]], ids=" ".join)
@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("book.csv", "book.csv"),
        ("book.csv", "./lake/../book.csv"),
        ("book.csv", "linked.csv"),
        ("linked.csv", "book.csv"),
        ("book.parquet", "book.parquet"),
        ("lake", "lake"),
        ("lake/*.parquet", "lake"),
        ("lake/0.parquet", "lake"),
        ("deep.parquet/in.parquet/0.parquet", "deep.parquet"),
        ("l*/*.csv", "lake/1.csv"),
        ("o.csv.parts/0.parquet", "o.csv"),
    ],
)
def test_what_is_read_is_never_written_over(source: str, out: str, flag: list[str]) -> None:
    for place in ("lake", "deep.parquet/in.parquet", "o.csv.parts"):
        Path(place).mkdir(parents=True)
        book().to_parquet(f"{place}/0.parquet", index=False)
    if source.endswith("*.csv"):
        book().to_csv("lake/1.csv", index=False)
    Path("linked.csv").symlink_to("book.csv")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    line = failed(2, "grad", source, "model.py:power", *flag, "--out", out)
    assert "would destroy it. Give --out another name." in line
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert after == before


def test_a_csv_file_is_there_until_the_new_one_is_whole() -> None:
    Path("o.csv").write_text("of last year\n")
    call = ["grad", "book.parquet", "model.py:strict", "--wrt", "x", "--out", "o.csv", "--overwrite"]
    failed(1, *call)
    assert Path("o.csv").read_text() == "of last year\n"
    done(*call, "--on-error", "null")
    assert read("o.csv").d_x.isna().sum() == 1


def test_resume_makes_only_what_is_missing_and_refuses_another_function() -> None:
    Path("many").mkdir()
    for number in range(3):
        read("book.parquet").iloc[2 * number : 2 * number + 2].to_parquet(f"many/{number}.parquet", index=False)
    call = ["grad", "many", "model.py:power", "--wrt", "x", "--out"]
    done(*call, "o.parquet")
    whole = {file.name: file.read_bytes() for file in Path("o.parquet").iterdir()}
    gone = sorted(whole)[1]
    Path("o.parquet", gone).unlink()
    times = {file.name: file.stat().st_mtime_ns for file in Path("o.parquet").iterdir()}
    done(*call, "o.parquet", "--resume")
    assert {file.name: file.read_bytes() for file in Path("o.parquet").iterdir()} == whole
    assert all(Path("o.parquet", name).stat().st_mtime_ns == time for name, time in times.items())
    line = failed(2, *call, "o.parquet", "--resume", "--derivative", "dy=y")
    assert "another result: they hold power: 'x', and what is asked for is power: 'd_x', 'dy'" in line
    assert "--overwrite replaces o.parquet" in line
    done(*call, "o.parquet", "--overwrite", "--derivative", "dy=y")
    assert "dy" in read("o.parquet")


def test_a_csv_file_is_continued_and_leaves_nothing_beside_it() -> None:
    call = ["grad", "book.parquet", "model.py:strict", "--wrt", "x", "--out", "o.csv"]
    failed(1, *call)
    beside = {path.name for path in Path().iterdir() if path.name.startswith("o.csv")}
    assert beside == {"o.csv.parts", "o.csv.parts.daskgrad"}
    done(*call, "--resume", "--on-error", "null", "--overwrite")
    assert [path.name for path in Path().iterdir() if path.name.startswith("o.csv")] == ["o.csv"]


def test_a_row_that_fails_is_named_in_one_line_and_its_traceback_is_for_debug() -> None:
    call = ["grad", "book.csv", "model.py:strict", "--wrt", "x", "--out", "o.csv"]
    line = failed(1, *call)
    assert "n=7" in line
    assert "row 7 of partition 0" in line
    assert "ValueError: not this one" in line
    result = run(*call, "--debug", "--overwrite")
    assert isinstance(result.exception, dg.RowError)
    assert "GraphError" not in failed(1, "grad", "book.csv", "model.py:cut", "--out", "p.csv")


@pytest.mark.slow
def test_a_whole_process_prints_one_line_and_its_status(folder: Path) -> None:
    code = "if __name__ == '__main__': from daskgrad._cli import main; main()"
    call = [sys.executable, "-c", code, "grad", "book.csv", "model.py:strict", "--wrt", "x", "--out", "o.csv", "--workers", "1"]
    ended = subprocess.run(call, capture_output=True, text=True, timeout=600, cwd=folder)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("Error: strict(x=")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_an_interrupt_need_not_wait_for_a_part(folder: Path) -> None:
    """The one part would take five minutes. Nothing is suspected afterwards: a mark would send it to a process of its own."""
    pd.DataFrame({"x": np.arange(30_000.0)}).to_csv("long.csv", index=False)
    Path("model_slow.py").write_text("import time\n\ndef slow(x):\n    time.sleep(0.01)\n    return x**2\n")
    code = "if __name__ == '__main__': from daskgrad._cli import main; main()"
    call = [sys.executable, "-c", code, "grad", "long.csv", "model_slow.py:slow", "--engine", "loop", "--out", "o.csv"]
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stderr is not None
        assert "rows/s" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        said = process.stderr.read()
    assert said.splitlines()[-1] == "Interrupted. The parts that are written stay: the same call with --resume goes on."
    assert "failed" not in said
    assert not list(Path("o.csv.parts.daskgrad").glob("*.running"))


# --- where it runs


@pytest.mark.cluster
def test_a_cluster_by_its_address(cluster: Any) -> None:
    """The workers have never seen the file: its functions travel by value."""
    address = cluster.scheduler.address
    done("grad", "book.parquet", "model.py:power", "--scheduler", address, "--only", "--out", "o.parquet")
    np.testing.assert_allclose(read("o.parquet").d_x, 6 * book().x ** 2 * book().y, rtol=1e-12)


def test_a_scheduler_that_is_none_is_refused() -> None:
    result = run("grad", "book.csv", "model.py:power", "--scheduler", "thread")
    assert result.exit_code == 2
    assert "neither threads nor local nor an address" in result.stderr


def test_the_schedulers_setting_is_as_before() -> None:
    before = dask.config.get("scheduler", None)
    done("grad", "book.csv", "model.py:power", "--scheduler", "synchronous")
    assert dask.config.get("scheduler", None) == before


# --- explain, help, completion


def test_explain_takes_the_arguments_of_grad_and_writes_nothing() -> None:
    said = done("explain", "book.csv", "model.py:signed", "--wrt", "x", "--where", "n > 2", "--out", "o.csv").stdout
    assert "signed on a Dask DataFrame" in said
    assert "kind" in said
    assert "static" in said
    assert not Path("o.csv").exists()


def test_help_tells_the_grammar_the_exit_status_and_completion() -> None:
    said = done("grad", "--help").stdout
    for text in ("norm(x)", "--resume", "Exit status", "FILE.py:function", "--where"):
        assert text in said
    assert "_DASKGRAD_COMPLETE=bash_source" in done("--help").stdout


def test_a_shell_can_ask_for_completion() -> None:
    from click.shell_completion import BashComplete

    complete = BashComplete(main, {}, "daskgrad", "_DASKGRAD_COMPLETE")
    offered = [item.value for item in complete.get_completions(["grad", "book.csv", "model.py:power"], "--w")]
    assert offered == ["--wrt", "--where", "--workers"]
    assert [item.type for item in complete.get_completions(["grad"], "bo")] == ["file"]
    assert [item.value for item in complete.get_completions(["grad", "a", "b", "--engine"], "v")] == ["vmap"]


# --- the grammar


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("value", ()),
        ("()", ()),
        ("x", ("x",)),
        ("x,y", ("x", "y")),
        (" ( x , x ) ", ("x", "x")),
        ("'value'", ("value",)),
        ("lambda", ("lambda",)),
        ("model.0.weight", ("model.0.weight",)),
        ("problem", dg.problem),
        ("norm(x)", dg.norm("x")),
        ("norm(x, y)", dg.norm(["x", "y"])),
        ("norm([x, y])", dg.norm(["x", "y"])),
        ("norm((x, y))", dg.norm(("x", "y"))),
        ("norm('model.*.weight')", dg.norm("model.*.weight")),
        ("norm(model, per_layer=True)", dg.norm("model", per_layer=True)),
        ("dot(x, v)", (dg.dot("x", "v"),)),
        ("x, dot(x, [1, -2.5])", ("x", dg.dot("x", [1, -2.5]))),
        ("project(x, 8, seed=3)", dg.project("x", 8, 3)),
        ("aux(half)", dg.aux("half")),
        ("aux(half, array=True)", dg.aux("half", array=True)),
    ],
)
def test_a_spec_means_what_the_same_python_means(text: str, means: Any) -> None:
    assert _spec.derivative(text, "name") == means


@pytest.mark.parametrize("text", ["", "x+1", "1", "norm()", "f(x)", "dot(x)", "project(x)", "project(x, 0)", "norm(x", "x.y()", "dot(*a)"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(dg.PlanError):
        _spec.derivative(text, "name")


@given(st.text(max_size=12))
def test_any_text_is_a_derivative_or_refused(text: str) -> None:
    for read in (lambda text: _spec.derivative(text, "name"), _spec.by):
        try:
            read(text)
        except dg.PlanError:
            continue


def test_any_call_of_the_vocabulary_is_refused_or_made() -> None:
    makers: list[Callable[[str], str]] = [lambda a: f"norm({a})", lambda a: f"dot({a})", lambda a: f"project({a})", lambda a: f"aux({a})"]
    for make in makers:
        for arguments in ("x, y, z", "x, y=1", "1, 2", "**x", "x, (y", "'x'", "x, 3", "x, 3, 4, 5"):
            try:
                _spec.derivative(make(arguments), "name")
            except dg.PlanError:
                continue
