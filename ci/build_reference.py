"""The reference as a folder of web pages: the docstrings, the README, the pages of ci/docs, the notebooks and the command's help.

pdoc renders everything; what is no module becomes one that has a docstring only. What `ci/reference` runs, and the tests use.
"""

from __future__ import annotations

import base64
import html
import re
import shutil
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import nbformat
import pdoc.doc
import pdoc.render
from click.testing import CliRunner

import daskgrad
from daskgrad._cli import main as command

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "ci" / "docs"
FIRST = ("grad_column", "derivatives", "norm", "dot", "project", "aux", "problem", "mean_gradient", "fisher_diagonal", "clipped_sum",
         "parameter_slices", "checkpoints", "explain", "gradcheck")  # fmt: skip
OTHERS = ("PlanError", "GraphError", "RowError", "EngineWarning", "DaskgradError")  # last


def build(folder: Path) -> list[Path]:
    """Write the pages, and what they show, into `folder`, and return the pages' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {page.modulename: page for page in _pages(folder)}
    pdoc.render.configure(docformat="google", template_directory=PAGES, show_source=False, footer_text=f"daskgrad {daskgrad.__version__}")
    written = []
    for name, page in pages.items():
        path = folder / f"{name}.html"
        path.write_text(pdoc.render.html_module(page, pages), encoding="utf-8")
        written.append(path)
    (folder / "search.js").write_text(pdoc.render.search_index(pages), encoding="utf-8")
    return written


def _pages(folder: Path) -> Iterator[pdoc.doc.Module]:
    yield _page("index", _linked((ROOT / "README.md").read_text(encoding="utf-8"), ROOT, folder))
    yield _names()
    yield _page("command", _help())
    for path in sorted(PAGES.glob("*.md")):
        yield _page(path.stem, _linked(path.read_text(encoding="utf-8"), PAGES, folder))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        yield _page(path.stem, _notebook(path, folder))


def _page(name: str, markdown: str) -> pdoc.doc.Module:
    """A page that is a text."""
    made: Any = types.ModuleType(name, markdown)
    made.__docformat__, made.__all__ = "markdown", []
    made.title = "README" if name == "index" else re.sub(r"^# +", "", markdown.split("\n", 1)[0])
    return pdoc.doc.Module(made)


def _names() -> pdoc.doc.Module:
    """The page of the public names."""
    public = sorted(name for name, value in vars(daskgrad).items() if not name.startswith("_") and not isinstance(value, types.ModuleType))
    middle = [name for name in public if name not in FIRST + OTHERS]
    made: Any = types.ModuleType("daskgrad", daskgrad.__doc__)
    made.__all__ = [name for name in (*FIRST, *middle, *OTHERS) if name in public]
    made.title = "Reference"
    vars(made).update({name: getattr(daskgrad, name) for name in made.__all__})
    page = pdoc.doc.Module(made)
    for member in page.flattened_own_members:
        member.docstring = _fenced(member.docstring or getattr(vars(made).get(member.qualname), "__doc__", None) or "")  # type: ignore[misc]
    return page


def _fenced(docstring: str) -> str:
    """A docstring whose examples stand in a block of code."""

    def block(match: re.Match[str]) -> str:
        lines = [re.sub(r"\s*# doctest: .*", "", line) for line in match[1].splitlines()]
        return "\n\n###### Example:\n\n```python\n" + "\n".join(line.removeprefix("    ") for line in lines).strip() + "\n```\n"

    return re.sub(r"\n+Examples?:\n((?: {4}.*\n?|\n)+)", block, docstring)


def _help() -> str:
    """What the command says of itself."""
    text = ["# The command\n"]
    for words in (["--help"], *([name, "--help"] for name in command.commands)):
        said = CliRunner().invoke(command, words, prog_name="daskgrad", terminal_width=92, max_content_width=92).output
        text.append(f"## daskgrad {' '.join(words[:-1])}\n\n```text\n{said.rstrip()}\n```\n")
    return "\n".join(text)


def _linked(markdown: str, base: Path, folder: Path) -> str:
    """A text from `base` whose links to files lead to pages, or to copies of the files."""

    def place(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or urlsplit(target).scheme:
            return match[0]
        file = (base / target).resolve()
        if file == ROOT / "README.md":
            name = "index.html"
        elif file.suffix in (".md", ".ipynb"):
            name = f"{file.stem}.html"
        else:
            name = file.name
            if file.is_file():
                shutil.copyfile(file, folder / name)
        return match[1] + name + ("#" + anchor if anchor else "") + match[3]

    return re.sub(r"""(\]\(|src=["']|href=["'])([^)"'\s]+)([)"'])""", place, markdown)


def _notebook(path: Path, folder: Path) -> str:
    """A notebook with its outputs, as one text; its pictures become files in `folder`."""
    text = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        text.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            text.append(_output(data, folder / f"{path.stem}_{number}.png"))
    return "\n\n".join(text)


def _output(data: Mapping[str, str], picture: Path) -> str:
    if "image/png" in data:
        picture.write_bytes(base64.b64decode(data["image/png"]))
        return f'<img alt="" src="{picture.name}">'
    if "text/html" in data:
        return "<div>" + re.sub(r"\n\s*", "", data["text/html"]) + "</div>"
    return f'<pre class="output">{html.escape(data["text/plain"].rstrip())}</pre>'


# --- links ------------------------------------------------------------------------------------------------------------


@dataclass
class _Links(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    links: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.places.add(value)


def broken(folder: Path) -> list[str]:
    """The links within the pages of `folder` that lead nowhere; links to other sites are not followed."""
    found = {}
    for path in sorted(folder.glob("*.html")):
        found[path.name] = _Links()
        found[path.name].feed(path.read_text(encoding="utf-8"))
    wrong = []
    for name, page in found.items():
        for link in page.links:
            url = urlsplit(link)
            target = unquote(url.path) or name
            if url.scheme or url.netloc:
                continue
            if not (folder / target).is_file() or (url.fragment and unquote(url.fragment) not in found[target].places):
                wrong.append(f"{name}: {link}")
    return wrong


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "build" / "reference")
def main(folder: Path) -> None:
    """Build the reference into FOLDER and check its links."""
    pages = build(folder)
    wrong = broken(folder)
    for line in wrong:
        click.echo(f"leads nowhere: {line}", err=True)
    click.echo(f"{len(pages)} pages in {folder}, to be read from {folder / 'index.html'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
