"""The command, as a person runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from daskgrad._cli import main

ROWS = 20_000


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "new" / "folder"


@pytest.fixture(scope="module")
def said(out: Path) -> str:
    """What `daskgrad demo` prints; its own process, as its workers import what started them."""
    command = [sys.executable, "-c", "if __name__ == '__main__': from daskgrad._cli import main; main()", "demo"]
    options = ["--rows", str(ROWS), "--out", str(out), "--workers", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


def test_version_is_the_packages() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"daskgrad, version {metadata.version('daskgrad')}\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, daskgrad._cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


@pytest.mark.parametrize("options", [["--rows", "0"], ["--rows", "many"], ["--workers", "0"]])
def test_options_that_make_no_sense_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(main, ["demo", *options])
    assert result.exit_code == 2
    assert options[0] in result.output


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not installed
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "pip install daskgrad[demo]" in result.output


@pytest.mark.cluster
def test_demo_prints_the_link_the_speed_and_what_it_wrote(said: str, out: Path) -> None:
    assert re.search(r"http://127\.0\.0\.1:\d+/status", said)
    assert re.search(r"[\d,]+ rows/s", said)
    assert f"{ROWS:,} European options" in said
    for name in ("digits.parquet", "book", "deltas"):
        assert str(out / name) in said
        assert (out / name).exists()
    assert "What to try next" in said


@pytest.mark.cluster
def test_demos_deltas_equal_a_central_difference(said: str, out: Path) -> None:
    """The difference that it prints is against a formula; this one is against the price alone."""
    from daskgrad._demo import price

    options = pd.read_parquet(out / "deltas")
    book = pd.read_parquet(out / "book")
    pd.testing.assert_frame_equal(options[book.columns], book)
    spot, *others = (torch.tensor(book[name].to_numpy()) for name in ("spot", "strike", "vol", "rate", "expiry"))
    step = 1e-4
    numeric = (price(spot + step, *others) - price(spot - step, *others)) / (2 * step)
    np.testing.assert_allclose(options["delta"], numeric.numpy(), rtol=0, atol=1e-6)
    assert len(list((out / "book").glob("*.parquet"))) > 1
    printed = re.search(r"closed form: (\S+)", said)
    assert printed
    assert float(printed[1]) < 1e-12


@pytest.mark.cluster
def test_demos_digits_carry_their_gradients(said: str, out: Path) -> None:
    from daskgrad._demo import LEARNT, fit, load_digits, loss

    written = pd.read_parquet(out / "digits.parquet")
    images = load_digits()
    model = fit(images[:LEARNT])
    assert len(written) == len(images)
    for row in range(0, len(images), 100):
        pixels = torch.tensor(images["pixels"][row], requires_grad=True)
        value = loss(pixels, torch.tensor(images["digit"][row]), model)
        (expected,) = torch.autograd.grad(value, pixels)
        np.testing.assert_allclose(written["gradient"][row], expected.numpy(), rtol=1e-4, atol=1e-6)
    sizes = written["gradient"].map(np.linalg.norm)
    assert re.search(rf"^\s+{sizes.idxmax()}\s+\d\s+\d", said, re.MULTILINE)
