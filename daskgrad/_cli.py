"""The command `daskgrad`. What a subcommand needs is imported when it runs, so that help and completion are instant."""

from __future__ import annotations

from pathlib import Path

import click

from . import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
