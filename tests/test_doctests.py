"""The examples in the docstrings of the public names, executed as they are printed."""

from __future__ import annotations

import doctest
import inspect

import pytest

import daskgrad as dg

FUNCTIONS = {name: value for name, value in vars(dg).items() if inspect.isfunction(value) and not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_the_examples_run(name: str) -> None:
    found = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs={})
    examples = [test for test in found if test.examples]
    assert examples, f"dg.{name} shows no example"
    for test in examples:
        result = doctest.DocTestRunner(verbose=False).run(test)
        assert result.failed == 0, f"{result.failed} of the {result.attempted} examples of dg.{name} fail; they are printed above"


@pytest.mark.parametrize("name", sorted(name for name in vars(dg) if not name.startswith("_")))
def test_every_public_name_says_what_it_is(name: str) -> None:
    value = getattr(dg, name)
    if not inspect.ismodule(value):
        assert value.__doc__  # of the class itself: an exception does not inherit one
