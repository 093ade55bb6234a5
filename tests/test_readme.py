"""Every Python block of README.md and of the pages in ci/docs runs, section by section, and prints what the text says it prints.

A section (a heading of level 1 or 2) is like a notebook: one namespace, its blocks in order. A ```text block that comes
next after a ```python block shows its output: what it prints, then the value of its last line if that is an expression
(as a notebook would show it). `...` in it stands for anything.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
TEXTS = [README, *sorted((README.parent / "ci" / "docs").glob("*.md"))]
HEADING = re.compile(r"#{1,2}\s+(.*)")
FENCE = re.compile(r"(`{3,}|~{3,})\s*(\w*)")


@dataclass
class Block:
    language: str
    line: int  # of its first line of text, from 1
    text: str
    shows: str | None = None  # the output that the next block shows


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


def sections(markdown: str) -> list[Section]:
    """The sections that hold Python, each with its Python blocks and the output shown for them."""
    found = [Section("(top)")]
    before: str | Block = ""
    for item in headings_and_blocks(markdown):
        if isinstance(item, str):
            found.append(Section(item))
        elif item.language == "python":
            found[-1].blocks.append(item)
        elif item.language == "text" and isinstance(before, Block) and before.language == "python":
            before.shows = item.text
        before = item
    return [section for section in found if section.blocks]


def headings_and_blocks(markdown: str) -> Iterator[str | Block]:
    lines = iter(enumerate(markdown.splitlines(), 1))
    for number, line in lines:
        if fence := FENCE.fullmatch(line.strip()):
            text = []
            for _, inside in lines:
                if inside.strip() == fence[1]:
                    break
                text.append(inside)
            else:
                raise AssertionError(f"the block that starts in line {number} has no end")
            yield Block(fence[2], number + 1, "\n".join(text) + "\n")
        elif heading := HEADING.fullmatch(line):
            yield heading[1]


def run(section: Section, filename: str) -> list[str]:
    """What is wrong with a section: its blocks that printed something else than shown. A block that fails, raises."""
    # __main__, so that functions travel to workers by value, as those of a notebook do
    namespace: dict[str, Any] = {"__name__": "__main__"}
    wrong = []
    for block in section.blocks:
        printed = output_of(block, namespace, filename)
        if block.shows is not None and not same(block.shows, printed):
            wrong.append(f"{filename}:{block.line} shows\n{block.shows}and printed\n{printed}")
    return wrong


def output_of(block: Block, namespace: dict[str, Any], filename: str) -> str:
    # blank lines in front, so that tracebacks and error messages name the README's own lines
    source = "\n" * (block.line - 1) + block.text
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, filename, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)
            if value is not None:
                print(repr(value))
    return printed.getvalue()


def same(shown: str, printed: str) -> bool:
    strip = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (shown, printed)]
    want, got = ("\n".join(lines) + "\n" for lines in strip)
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def all_sections() -> list[Any]:
    return [pytest.param(path, section, id=f"{path.stem}-{section.title}") for path in TEXTS for section in sections(path.read_text())]


@pytest.mark.cluster
@pytest.mark.parametrize(("path", "section"), all_sections())
def test_the_text_runs(path: Path, section: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = run(section, str(path))
    assert not wrong, "\n".join(wrong)


def test_readme_has_code() -> None:
    assert sections(README.read_text()), "README.md has no Python block"


# --- the runner itself

EXAMPLE = """
# Title
```python
x = 3
x * 2
```
gives
```text
6
```
```bash
exit 1
```
## Other
~~~python
print("a", 1 / 3)
~~~
```text
a 0.33...
```
```python
'x' in globals()
```
```text
True
```
"""


def test_runner_finds_sections_blocks_and_output() -> None:
    first, second = sections(EXAMPLE)
    assert [first.title, second.title] == ["Title", "Other"]
    assert [(block.line, block.shows) for block in first.blocks] == [(4, "6\n")]
    assert len(second.blocks) == 2


def test_runner_tells_what_differs() -> None:
    first, second = sections(EXAMPLE)
    assert run(first, "example-1.md") == []
    (wrong,) = run(second, "example-2.md")  # x was another section's
    assert wrong.startswith("example-2.md:22 shows\nTrue\n")
    assert wrong.endswith("False\n")


def test_runner_lets_an_error_through_with_its_line() -> None:
    (section,) = sections("# T\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run(section, "example-3.md")
    assert caught.traceback[-1].lineno == 4  # from 0


def test_runner_refuses_a_block_without_an_end() -> None:
    with pytest.raises(AssertionError, match="line 1 has no end"):
        sections("```python\nx = 1\n")
