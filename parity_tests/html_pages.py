"""A page taken apart: its elements, tables and text, and what is wrong with its form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, tag: str) -> list[Element]:
        """Every element of that tag within, in the order of the page."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += [child] * (child.tag == tag) + child.all(tag)
        return found

    def everything(self) -> list[Element]:
        found = [self]
        for child in self.children:
            found += child.everything() if isinstance(child, Element) else []
        return found

    def is_in(self, style: str) -> bool:
        return style in (self.attributes.get("class") or "").split()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.stack = [self.root]
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        if len(element.attributes) != len(attrs):
            self.problems.append(f"<{tag}> has an attribute twice")
        self.stack[-1].children.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self.stack[-1].tag != tag:
            self.problems.append(f"</{tag}> closes <{self.stack[-1].tag}>")
        else:
            self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.stack[-1].children.append(data)


def read_page(content: bytes) -> Element:
    """The elements of a page; AssertionError names everything that is wrong with its form."""
    reader = _Reader()
    reader.feed(content.decode("utf-8"))
    reader.close()
    root, problems = reader.root, reader.problems
    problems += [f"<{e.tag}> is never closed" for e in reader.stack[1:]]
    elements = root.everything()
    ids = [e.attributes["id"] for e in elements if "id" in e.attributes]
    problems += [f"id {i} is there twice" for i in set(ids) if ids.count(i) > 1]
    headings = [int(e.tag[1]) for e in elements if re.fullmatch("h[1-6]", e.tag)]
    if headings[:1] != [1] or headings.count(1) != 1:
        problems.append("one h1 is needed, as the first heading")
    problems += [f"h{b} follows h{a}" for a, b in pairwise(headings) if b > a + 1]
    for e in elements:
        for name in ("aria-labelledby", "aria-describedby"):
            for target in (e.attributes.get(name) or "").split():
                if target not in ids:
                    problems.append(f"{name} names {target}, which is nowhere")
        if e.tag == "svg" and not (e.attributes.get("role") == "img" and e.all("title")[0].text):
            problems.append("an svg without role or title")
        if e.tag == "table" and not (
            e.all("caption")[0].text and all(h.attributes.get("scope") for h in e.all("th"))
        ):
            problems.append("a table without caption or scope")
        if e.tag in ("script", "link", "iframe", "img", "object", "embed", "base", "form"):
            problems.append(f"<{e.tag}>")
        for name, value in e.attributes.items():
            if name.startswith("on") or name in ("src", "href", "xlink:href", "srcset"):
                problems.append(f"{name}={value}")
            if name == "style" and "url(" in (value or ""):
                problems.append(f"style {value}")
    style = root.all("style")[0].text
    problems += [word for word in ("url(", "@import", "http") if word in style]
    assert not problems, "; ".join(problems)
    return root


def rows_of(table: Element) -> list[dict[str, str]]:
    """The body of a table, each row by the heads of its columns."""
    columns = [h.text for h in table.all("thead")[0].all("th")]
    return [
        dict(zip(columns, [c.text for c in row.children if isinstance(c, Element)], strict=True))
        for row in table.all("tbody")[0].all("tr")
    ]
