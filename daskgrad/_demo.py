"""`daskgrad demo`: two real runs that a newcomer can watch, and read here.

The row functions are `loss` and `price`: each written for one row, in torch alone. All else makes data or prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ._cluster import local_client
from ._column import grad_column

Say = Callable[[str], None]

BOOK_FILES = 8
SHADES = " ·░▒▓█"
TOP = 5  # rows printed
LEARNT = 1_000  # images that the classifier is fitted to; it has never seen the others


# --- the row functions


def loss(pixels: torch.Tensor, digit: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """How wrong `model` is about one image: its cross entropy.

    Args:
        pixels: one image, 8×8 in a row.  # (64,)
        digit: what it shows, 0 to 9.  # ()
        model: the same for every row.
    """
    return functional.cross_entropy(model(pixels), digit)


def price(spot: torch.Tensor, strike: torch.Tensor, vol: torch.Tensor, rate: torch.Tensor, expiry: torch.Tensor) -> torch.Tensor:
    """One European call by the Black-Scholes formula (Black and Scholes 1973, J. Polit. Econ. 81, 637)."""
    spread = vol * torch.sqrt(expiry)
    d1 = (torch.log(spot / strike) + (rate + vol**2 / 2) * expiry) / spread
    discount = torch.exp(-rate * expiry)
    value: torch.Tensor = spot * torch.special.ndtr(d1) - strike * discount * torch.special.ndtr(d1 - spread)
    return value


# --- the run


def run(rows: int, out: Path, workers: int | None, say: Say) -> None:
    """Both parts on one private cluster.

    Args:
        rows: options in the generated book.
        out: folder for what is written; made if need be.
        workers: worker processes; None: one per core.
        say: prints one line.
    """
    out.mkdir(parents=True, exist_ok=True)
    with local_client(n_workers=workers) as client:
        say(f"A private cluster of {_count(len(client.nthreads()), 'worker process', 'es')} on this machine.")
        say(f"Watch it work: {client.dashboard_link}")
        images = show_digits(out / "digits.parquet", say)
        book, deltas = show_options(rows, out, say)
    say("\nWritten")
    say(f"  {images}   the images, each with its gradient")
    say(f"  {book}/*.parquet   the book")
    say(f"  {deltas}/*.parquet   the book with its delta column")
    say("\nWhat to try next")
    say(f"  pd.read_parquet({str(deltas)!r})   look at the result")
    say("  daskgrad demo --rows 10000000   ten times the rows: memory stays where it is")
    say("  daskgrad.grad_column(df, your_function)   on a dataframe of your own")


# --- 1. digits


def show_digits(path: Path, say: Say) -> Path:
    """Fit a classifier, add each image's gradient as a column, print the rows with the largest; returns the file."""
    say("\n1. Handwritten digits: which images would the classifier's loss change most for?\n")
    images = load_digits()
    started = time.perf_counter()
    model = fit(images[:LEARNT])
    say(f"   Fitted a classifier to {LEARNT:,} of {len(images):,} images in {time.perf_counter() - started:.1f} s.")
    say('   images["gradient"] = daskgrad.grad_column(images, loss, shared={"model": model})')
    started = time.perf_counter()
    images["gradient"] = grad_column(images, loss, shared={"model": model})
    say(f"   {len(images):,} gradients by the pixels, {time.perf_counter() - started:.2f} s.\n")
    for line in largest(images, model):
        say("   " + line)
    images.to_parquet(path)
    return path


def load_digits() -> pd.DataFrame:
    """scikit-learn's bundled digits: `pixels` (float32 cells of shape (64,), 0 to 1) and `digit` (int64)."""
    from sklearn.datasets import load_digits as load

    bunch = load()
    cells = list((bunch.data / 16).astype("float32"))
    return pd.DataFrame({"pixels": pd.Series(cells, dtype=object), "digit": bunch.target.astype("int64")})


def fit(images: pd.DataFrame, steps: int = 150) -> torch.nn.Module:
    """A small classifier, the same on every run. The caller's random state is as before afterwards."""
    pixels = torch.from_numpy(np.stack(list(images["pixels"])))  # (images, 64)
    digits = torch.tensor(images["digit"].to_numpy())  # (images,)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(pixels), digits).backward()
        optimizer.step()
    return model.eval()


def largest(images: pd.DataFrame, model: torch.nn.Module) -> list[str]:
    """The rows with the largest gradients as a table, and the first of them as a picture."""
    size = images["gradient"].map(np.linalg.norm)
    top = images.loc[size.nlargest(TOP).index]
    digits = torch.tensor(top["digit"].to_numpy())  # (top,)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.stack(list(top["pixels"]))))  # (top, 10)
    table = pd.DataFrame(
        {
            "image": top.index,
            "shows": digits.numpy(),
            "taken for": logits.argmax(1).numpy(),
            "loss": functional.cross_entropy(logits, digits, reduction="none").numpy(),
            "|gradient|": size[top.index].to_numpy(),
        }
    )
    first = top.iloc[0]
    pictures = zip(shaded(first["pixels"]), shaded(np.abs(first["gradient"])), strict=True)
    return [
        *table.to_string(index=False, float_format="%.2f").splitlines(),
        "",
        f"{f'image {top.index[0]}':<18}what its loss hangs on",
        *(f"{image}  {gradient}".rstrip() for image, gradient in pictures),
    ]


def shaded(pixels: NDArray[np.floating]) -> list[str]:  # (64,)
    """Eight lines that show an image, dark for large."""
    top = float(pixels.max()) or 1.0
    level = np.rint(pixels.reshape(8, 8) / top * (len(SHADES) - 1)).astype(int)  # (8, 8)
    return ["".join(SHADES[i] * 2 for i in line) for line in level]


# --- 2. options


def show_options(rows: int, out: Path, say: Say) -> tuple[Path, Path]:
    """Write a book, add its delta lazily, write that, compare with the closed form; returns both folders."""
    say(f"\n2. A book of {rows:,} European options: their delta, from Parquet to Parquet.\n")
    book, deltas = out / "book", out / "deltas"
    write_book(rows, book)
    say(f"   The book: {_count(len(list(book.iterdir())), 'file')} in {book}")
    options = dd.read_parquet(book)
    options["delta"] = grad_column(options, price, wrt="spot")
    say('   options["delta"] = daskgrad.grad_column(options, price, wrt="spot")   nothing is computed yet')
    _make_empty(deltas)
    started = time.perf_counter()
    options.to_parquet(deltas, write_index=False)
    seconds = time.perf_counter() - started
    say(f"   Read, differentiated and written in {seconds:.1f} s: {rows / seconds:,.0f} rows/s, start included.")
    again = dd.read_parquet(deltas)
    worst = again.map_partitions(error_of_delta, meta=("error", "float64")).max().compute()
    say(f"   Largest difference from the closed form: {worst:.1e}")
    say("\n" + _indented(again.head(TOP).to_string(index=False, float_format="%.4f")))
    return book, deltas


def write_book(rows: int, folder: Path) -> None:
    """`rows` options in some Parquet files; the same for the same number of rows."""
    _make_empty(folder)
    random = np.random.default_rng(20)
    for number, numbers in enumerate(np.array_split(np.arange(rows), min(BOOK_FILES, rows))):
        count = len(numbers)
        strike = random.uniform(50, 150, count)
        frame = pd.DataFrame(
            {
                "option": numbers,
                "spot": strike * np.exp(random.normal(0, 0.2, count)),
                "strike": strike,
                "vol": random.uniform(0.1, 0.6, count),
                "rate": random.uniform(0.0, 0.06, count),
                "expiry": random.uniform(0.02, 3.0, count),  # years
            }
        )
        frame.to_parquet(folder / f"part-{number}.parquet", index=False)


def error_of_delta(options: pd.DataFrame) -> pd.Series:
    """|delta - N(d1)| of each option, the closed form computed without any gradient."""
    ratio = np.log(options["spot"] / options["strike"])
    spread = options["vol"] * np.sqrt(options["expiry"])
    d1 = (ratio + options["rate"] * options["expiry"]) / spread + spread / 2
    closed = torch.special.erfc(torch.tensor(d1.to_numpy()) / -(2**0.5)).numpy() / 2  # (rows,)
    error: pd.Series = (options["delta"] - closed).abs()
    return error.rename("error")


# --- small helpers


def _make_empty(folder: Path) -> None:
    """The folder, without the Parquet files of an earlier run; anything else in it is not ours."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("part*.parquet"):
        file.unlink()


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def _indented(text: str) -> str:
    return "\n".join("   " + line for line in text.splitlines())
