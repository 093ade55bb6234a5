"""The reference builds from what is here, says everything that is public, and its links lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import daskgrad as dg

ROOT = Path(__file__).parents[1]
BROKEN = """
import sys
from pathlib import Path
sys.path.insert(0, {ci!r})
from build_reference import broken
print(*broken(Path({folder!r})), sep="\\n")
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a process of its own, as `ci/reference` does."""
    folder = tmp_path_factory.mktemp("reference")
    built = [sys.executable, str(ROOT / "ci" / "build_reference.py"), str(folder)]
    ended = subprocess.run(built, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
def test_every_public_name_every_text_and_every_notebook_is_there(reference: Path) -> None:
    names = (reference / "daskgrad.html").read_text(encoding="utf-8")
    for name in (name for name in vars(dg) if not name.startswith("_")):
        assert f'<section id="{name}">' in names, name
    assert names.count("&gt;&gt;&gt;") > 20  # the examples, as code
    texts = [*(ROOT / "ci" / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert {path.stem for path in texts} | {"index", "daskgrad", "command"} == {page.stem for page in reference.glob("*.html")}
    assert "--derivative NAME=SPEC" in (reference / "command.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a><a href="b.html#gone">2</a><img src="none.png"><a href="https://x.org">3</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"><a href="#there">4</a><a href="c.html">5</a>')
    code = BROKEN.format(ci=str(ROOT / "ci"), folder=str(tmp_path))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.splitlines() == ["a.html: b.html#gone", "a.html: none.png", "b.html: c.html"]
