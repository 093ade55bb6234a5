"""The command `daskgrad`. What a subcommand needs is imported when it runs, so that help and completion are instant."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__, _options

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ._command import Request

USAGE, FAILED, INTERRUPTED = 2, 1, 130


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Tab completion, for this shell; put the line into ~/.bashrc or ~/.zshrc to keep it:
  eval "$(_DASKGRAD_COMPLETE=bash_source daskgrad)"
  eval "$(_DASKGRAD_COMPLETE=zsh_source daskgrad)"
  _DASKGRAD_COMPLETE=fish_source daskgrad | source""",
)
@click.version_option(__version__, prog_name="daskgrad")
def main() -> None:
    """Gradients of a PyTorch function of one row, as columns of your dataframe."""


@main.command()
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="Options in the generated book.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("daskgrad-demo"),
    show_default=True,
    help="Folder for the files it writes.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.  [default: one per core]")
def demo(rows: int, out: Path, workers: int | None) -> None:
    """See it work: a classifier's gradient per image, and the deltas of a million options.

    Starts a private cluster of processes on this machine, and ends it again.
    """
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:
        raise click.ClickException("the demo's digits come with scikit-learn: pip install daskgrad[demo]") from None
    from ._demo import run

    run(rows, out, workers, say=click.echo)


# --- a call in words --------------------------------------------------------------------------------------------------


class _Files(click.ParamType):  # type: ignore[type-arg]
    """Text that a shell completes with the names of files."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class _Command(click.Command):
    """A command that knows what a shell makes of a glob."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "unexpected extra argument" in error.message and sum(Path(text).exists() for text in given) > 1:
                ctx.fail(f"{error.message} A glob goes in quotes, 'data/*.csv', or the shell makes many arguments of it.")
            raise


_CALL = [
    click.argument("source", metavar="IN", type=_Files()),
    click.argument("function", metavar="FUNCTION", type=_Files()),
    click.option("--wrt", multiple=True, metavar="ARG", help="Differentiate by this argument: column d_COLUMN. [default: the first]"),
    click.option("--derivative", "named", multiple=True, metavar="NAME=SPEC", help="A derivative by name: gamma=spot,spot."),
    click.option("--input", "inputs", multiple=True, metavar="ARG=COLUMN", help="Feed an argument; x=a,b or x='f*' stacks columns."),
    click.option("--shared", multiple=True, metavar="ARG=VALUE", help="The same for every row: a number, or FILE.py:model."),
    click.option("--where", metavar="CONDITION", help="Only these rows: \"kind == 'call' and vol < 0.5\"."),
    click.option("--keep", multiple=True, metavar="COLUMN", help="Write these columns of IN beside the derivatives. [default: all]"),
    click.option("--only", is_flag=True, help="Write the derivatives alone."),
    click.option("--column", "dtypes", multiple=True, metavar="COLUMN=DTYPE", help="What a CSV column holds: n=float64."),
    click.option("--separator", help="Of a CSV file. [default: a comma]"),
    click.option("--missing", "gaps", multiple=True, metavar="TEXT", help="What stands for a missing value in CSV. [also: NA, null, …]"),
    click.option("--engine", type=click.Choice(_options.CHOICES["engine"]), default="auto", show_default=True),
    click.option("--on-error", type=click.Choice(_options.CHOICES["on_error"]), default="raise", show_default=True,
                 help="null: a row that fails is missing in the result, and the others go on."),
    click.option("--batch-size", type=click.IntRange(min=1), help="Rows computed at once. [default: chosen]"),
    click.option("--dtype", type=click.Choice(["float32", "float64"]), help="Of the computation. [default: that of the data]"),
    click.option("--device", help="cpu, cuda, cuda:1, or auto. [default: cpu]"),
    click.option("--allow-unused", is_flag=True, help="Zeros, not an error, where no argument reaches the output."),
    click.option("--randomness", type=click.Choice(_options.CHOICES["randomness"]), default="error", show_default=True,
                 help="Random draws: refused, for each row, or once for all."),
    click.option("--seed", type=int, help="Makes draws repeatable."),
    click.option("--scheduler", metavar="WHERE", default="threads", show_default=True,
                 help="threads of this process; local: processes on this machine; or the ADDRESS of a Dask cluster."),
    click.option("--workers", type=click.IntRange(min=1), help="Processes of --scheduler local (which this implies)."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
]  # fmt: skip

_FILES = [
    click.option("--out", type=click.Path(path_type=Path), metavar="OUT",
                 help="A .parquet folder or a .csv file. Without it the first rows are shown."),
    click.option("--resume", is_flag=True, help="Go on where an earlier run with the same IN and FUNCTION stopped."),
    click.option("--overwrite", is_flag=True, help="Replace OUT."),
    click.option("--quiet", is_flag=True, help="No progress, no summary."),
]  # fmt: skip

_SPECS = """\b
FUNCTION is FILE.py:function or package.module:function: a PyTorch function of one
row. Its arguments are the columns of their names.

\b
SPEC       column                    SPEC           column
value      what the function returns norm(x)        length of the gradient
x          d/dx                      norm(x, y)     of both together
x,y        d²/dx dy                  dot(x, v)      along column v
problem    what is wrong with a row  project(x, 8)  random projection
aux(name)  a further output

\b
Exit status: 0 done, 1 a row or a worker failed, 2 the call makes no sense,
130 interrupted."""


def _with(options: list[Any]) -> Callable[[Any], Any]:
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def _reported(command: Callable[..., None]) -> Callable[..., None]:
    """`command` whose errors are one line and an exit status, and whose warnings are one line each."""

    from ._errors import EngineWarning

    @functools.wraps(command)
    def run(*, debug: bool, **arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("once", EngineWarning)
            warnings.filterwarnings("ignore", "The inplace keyword", category=Warning)  # Dask's own reader, under pandas 3.1
            warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {_one_line(str(message))}", err=True)
            try:
                command(**arguments)
            except (click.ClickException, click.exceptions.Exit):
                raise
            except (KeyboardInterrupt, Exception) as error:
                if debug:
                    raise
                click.echo(_interrupted(arguments) if isinstance(error, KeyboardInterrupt) else _sentence(error, arguments), err=True)
                raise SystemExit(_status(error)) from None

    return run


def _interrupted(arguments: dict[str, Any]) -> str:
    kept = "" if arguments["out"] is None else " The parts that are written stay: the same call with --resume goes on."
    return f"Interrupted.{kept}"


def _sentence(error: BaseException, arguments: dict[str, Any]) -> str:
    from ._errors import DaskgradError
    from ._input import files
    from ._unreadable import remedy

    found = remedy(error, lambda: files(arguments["source"]), arguments["separator"])
    if found is not None:
        return f"Error: {_one_line(found)}"
    if isinstance(error, DaskgradError):
        return f"Error: {_in_options(_one_line(str(error)))}"
    return f"Error: {type(error).__name__}: {_one_line(str(error))} (--debug shows where)"


def _in_options(text: str) -> str:
    """What a message says for Python, as it is written here."""
    text = text.split(" Convert it to numbers first; where it held arrays")[0]
    text = text.replace("inputs={argument: ['f0', 'f1']}", "--input ARGUMENT=f0,f1")
    text = re.sub(r"inputs=\{'(\w+)': column\}", r"--input \1=COLUMN", text)
    text = re.sub(r"shared=\{'(\w+)': (?:value|model)\}", r"--shared \1=VALUE", text)
    text = re.sub(r"\b(on_error|engine|randomness|dtype|device)=(['\"])([\w:]+)\2", lambda m: f"--{m[1].replace('_', '-')} {m[3]}", text)
    return text.replace("allow_unused=True", "--allow-unused")


def _status(error: BaseException) -> int:
    from ._errors import PlanError

    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return USAGE if isinstance(error, PlanError) else FAILED


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _request(source: str, function: str, *, keep: tuple[str, ...], only: bool, **rest: Any) -> Request:
    from ._command import Request

    text = {name: rest.pop(name) for name in ("wrt", "named", "inputs", "shared", "where", "dtypes", "separator", "gaps")}
    options = {name: value for name, value in rest.items() if value is not None}
    return Request(source, function, keep=keep if keep or only else None, options=options, **text)


def _scheduler(name: str, workers: int | None) -> AbstractContextManager[Any]:
    """Where it is computed: in this process, in processes of this machine, or on a cluster that runs already."""
    import dask

    if workers is not None and name == "threads":
        name = "local"
    if name == "local":
        import logging

        from ._cluster import local_client

        return local_client(workers, silence_logs=logging.CRITICAL)
    if "://" in name or ":" in name:
        from distributed import Client

        client: AbstractContextManager[Any] = Client(name)
        return client
    if name not in ("threads", "processes", "synchronous"):
        raise click.BadParameter(f"{name!r} is neither threads nor local nor an address such as tcp://host:8786", param_hint="--scheduler")
    return dask.config.set(scheduler=name)


@main.command(cls=_Command, epilog=_SPECS)
@_with([*_CALL[:8], *_FILES, *_CALL[8:]])
@_reported
def grad(out: Path | None, resume: bool, overwrite: bool, quiet: bool, scheduler: str, workers: int | None, **call: Any) -> None:
    """Differentiate FUNCTION at every row of IN, and write the table with its derivatives to OUT.

    IN is a Parquet or CSV file, a folder of them, or a quoted glob ('2024-*.csv').

    \b
    daskgrad grad book.csv model.py:price --wrt spot --out deltas.csv
    daskgrad grad book.parquet model.py:price --derivative gamma=spot,spot \\
        --derivative value=value --where "kind == 'call'" --out greeks.parquet
    """
    import time
    from contextlib import nullcontext

    from . import _command
    from ._watch._progress import progress

    request = _request(**call)
    with _scheduler(scheduler, workers):
        frame, made = _command.frame_of(request)
        if out is None:
            click.echo(_command.first_rows(frame))
            click.echo("These are the first rows; nothing is written. --out FILE.parquet or FILE.csv writes all.", err=True)
            return
        started = time.perf_counter()
        with nullcontext() if quiet else progress():
            files = _command.write(frame, request.source, out, resume=resume, overwrite=overwrite)
        if not quiet:
            for line in _command.summary(files, made, out, time.perf_counter() - started):
                click.echo(line)
            if call["on_error"] == "null" and "problem" not in "".join(call["named"]):
                click.echo("Rows that failed are missing, too: --derivative problem=problem says which, and why.", err=True)
        _command.finish(out)


@main.command(cls=_Command, epilog=_SPECS)
@_with([*_CALL[:8], *_FILES, *_CALL[8:]])
@_reported
def explain(scheduler: str, workers: int | None, out: Path | None, resume: bool, overwrite: bool, quiet: bool, **call: Any) -> None:
    """Say what `grad` with the same arguments would read, run and return, and why; a few rows are computed, nothing is written."""
    from . import _command

    with _scheduler(scheduler, workers):
        click.echo(str(_command.explanation_of(_request(**call))))
