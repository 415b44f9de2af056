"""Mistakes to plant into the running code, to see whether the suite finds them.

A bug replaces one piece of the source of one function. The function object keeps its identity and
gets the code of the changed source, so that everybody who holds it runs the mistake: layers,
trainers, names imported elsewhere. Both the source and its replacement stand in the table, so that
a bug which no longer fits the code is an error and not a bug that nobody plants.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class PlantedBug:
    """One mistake: in the source of `place`, "module:qualified.name", `old` becomes `new`.

    `checks` are the kinds of reference that should see it: "other backend", "complex step",
    "exact property", "a priori bound", "by hand". `tensor` is the operation or layer that the
    comparer's first divergence should name, where the mistake is in the model's numbers ("" else).
    `equivalent` is the proof in one sentence where no output can differ.
    """

    name: str
    place: str
    old: str
    new: str
    description: str
    checks: frozenset[str]
    tensor: str = ""
    equivalent: str = ""


def function_at(place: str) -> FunctionType:
    """The function object behind "module:qualified.name"; properties give their getter."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "__func__", found)  # static and class methods
    found = found.fget if isinstance(found, property) else found
    found = inspect.unwrap(found)  # context managers
    if not isinstance(found, FunctionType):
        raise TypeError(f"{place}: is a {type(found).__name__}, needed a function")
    return found


@contextmanager
def planted(bug: PlantedBug) -> Iterator[None]:
    """Run the block with the mistake in place; the right code returns, whatever happens.

    Raises ValueError where `old` does not stand exactly once in the source of `place`.
    """
    function = function_at(bug.place)
    right = function.__code__
    function.__code__ = _changed(bug, function)
    try:
        yield
    finally:
        function.__code__ = right


@contextmanager
def watched(places: Iterable[str]) -> Iterator[set[str]]:
    """Run the block noting in the set that it gets which of the functions are called."""
    seen: set[str] = set()
    right = []
    try:
        for place in places:
            function = function_at(place)
            tree = ast.parse(_source(function))
            # A name that module code cannot have, found after its globals among the builtins.
            tree.body[0].body[:0] = ast.parse(f"{_SEEN}({place!r})").body
            right.append((function, function.__code__))
            function.__code__ = _compiled(function, ast.unparse(tree), f"<watched {place}>")
        setattr(builtins, _SEEN, seen.add)
        yield seen
    finally:
        for function, code in right:
            function.__code__ = code
        if hasattr(builtins, _SEEN):
            delattr(builtins, _SEEN)


_SEEN = "_gpt_parity_seen"


def _source(function: FunctionType) -> str:
    return textwrap.dedent(inspect.getsource(function))


def _changed(bug: PlantedBug, function: FunctionType) -> CodeType:
    source = _source(function)
    if source.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: {bug.old!r} stands {source.count(bug.old)} times, needed 1")
    code = _compiled(function, source.replace(bug.old, bug.new), f"<planted {bug.name}>")
    if code.co_freevars != function.__code__.co_freevars:
        raise ValueError(f"{bug.name}: uses other outer variables than the right code")
    return code


def _compiled(function: FunctionType, source: str, filename: str) -> CodeType:
    """The code of a changed source, in place of that of `function`."""
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("def ", "async def ")))
    body = textwrap.indent("\n".join(lines[start:]), "    ")
    # A class around it gives methods the cell that a bare super() needs.
    cells = "__class__" in function.__code__.co_freevars
    wrapped = f"class _Owner:\n{body}\n" if cells else "\n".join(lines[start:])
    module = importlib.import_module(function.__module__)
    flags = "from __future__ import annotations\n"
    names: dict[str, Any] = {}
    exec(compile(flags + wrapped, filename, "exec"), module.__dict__, names)
    changed = names["_Owner"].__dict__[function.__name__] if cells else names[function.__name__]
    return inspect.unwrap(getattr(changed, "__func__", changed)).__code__
