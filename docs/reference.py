"""What the code says of itself: options, refusals, types of transformers, tested releases, and who imports whom."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import pydoc
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from dfa_megatron.config import CONFIGS, MegatronConfig
from dfa_megatron.runtime.environment import TESTED, span
from docs.measured import Lines, table

PACKAGE = Path(__file__).parents[1] / "dfa_megatron"
FRAMEWORKS = ("megatron", "deepspeed", "huggingface")


def options() -> Lines:
    """Return the options: names, values, where they are set, and what they are about."""
    lines, where_set = [], dict(zip(("all", "frameworks", "Megatron"), CONFIGS, strict=True))
    for spec in fields(MegatronConfig):
        about = spec.metadata
        values: Iterable[object] = dict.fromkeys((spec.default, *(about["choices"] or ())))
        if isinstance(spec.default, bool):
            values = (False, True)
        shown = ", ".join(f"`{value}`" for value in values)
        shown += ", `1`, `2`, ..." if about["numbers"] and about["choices"] else ""
        where = next(w for w, config in where_set.items() if spec.name in config.__dataclass_fields__)
        lines.append([f"[`{spec.name}`](#{spec.name})", shown, where])
    return table(["option", "values, the default first", "where"], lines)


def meanings() -> Lines:
    """Return a section for each option: what it is about, then a line for each value that its help explains."""
    lines: list[str] = []
    for spec in fields(MegatronConfig):
        sentences = re.split(r"(?<=\.) (?=\S)", spec.metadata["help"])
        values = [re.sub(r"^(\w+): ", r"- `\1`: ", one) for one in sentences if re.match(r"\w+: ", one)]
        about = " ".join(sentence for sentence in sentences if not re.match(r"\w+: ", sentence))
        lines += [f"### {spec.name}", "", about, "", *values, ""]
    return lines


def tested() -> Lines:
    """Return the releases that tests pass with, in a sentence."""
    return textwrap.wrap(f"Releases: {', '.join(f'{package} {span(package)}' for package in TESTED)}.", 120)


def names() -> Lines:
    """Return the functions and classes of the API: what each takes, and the first paragraph of its docstring."""
    text, lines = (PACKAGE.parent / "docs/api.md").read_text(encoding="utf-8"), []
    for name in re.findall(r"^\.\. auto(?:function|class):: dfa_megatron\.(\S+)", text, re.MULTILINE):
        found: Any = pydoc.locate(f"dfa_megatron.{name}")
        taken = inspect.signature(found).parameters.values()
        shown = [{"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(one.kind.name, "") + one.name for one in taken]
        keywords = [at for at, one in enumerate(taken) if one.kind.name == "KEYWORD_ONLY"]
        if keywords and not any(one.startswith("*") for one in shown):
            shown.insert(keywords[0], "*")
        about = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split()).rstrip(":")
        lines.append([f"`{name}({', '.join(one for one in shown if not one.startswith('_'))})`", about])
    return table(["name", "what it does"], lines)


# Refusals.


def statements(framework: str) -> Iterator[tuple[Path, ast.Module, list[ast.Call]]]:
    """Yield each module of a framework, and the errors of its `raise UnsupportedError(...)`, by line."""
    for path in sorted((PACKAGE / framework).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        calls = [exc for exc in raised if isinstance(exc, ast.Call) and ast.unparse(exc.func) == "UnsupportedError"]
        yield path, tree, sorted(calls, key=lambda call: call.lineno)


def refusals(framework: str) -> Lines:
    """Return a framework's refusals: the first line of each module that has some, and a list of them."""
    lines = []
    for _, tree, calls in statements(framework):
        if calls:
            title = (ast.get_docstring(tree) or "").splitlines()[0].rstrip(".")
            refused = dict.fromkeys(one for call in calls for one in _refused(call, tree))
            lines += [f"**{title}**", "", *(f"- {one}" for one in refused), ""]
    return lines


def _refused(call: ast.Call, tree: ast.Module) -> Iterator[str]:
    """Yield what a statement refuses, or all that stand in the dictionary of its other texts: `*REFUSED[name]`."""
    near = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and 0 < call.lineno - node.lineno < 9]
    near.sort(key=lambda node: node.lineno)
    local = {ast.unparse(x.targets[0]): x.value for x in near if isinstance(x.value, ast.JoinedStr)}
    first, second = call.args[:2]
    what = _text(local.get(first.id, first) if isinstance(first, ast.Name) else first)
    texts = second.value if isinstance(second, ast.Starred) else None
    if not isinstance(texts, ast.Subscript):
        yield what
        return
    rows = _constants(tree)[ast.unparse(texts.value)]
    assert isinstance(rows, ast.Dict)
    yield from (what.replace(_text(texts.slice), _text(key)) for key in rows.keys if key is not None)


def _text(node: ast.expr) -> str:
    """Return a text as readers are to see it, with the names of what it is made of in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value)
    if isinstance(node, ast.Name) and (constant := _everywhere().get(node.id)) is not None:
        return _text(constant)
    return "{" + ast.unparse(node) + "}"


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the constants of a module, by name."""
    found = [(ast.unparse(x), node.value) for node in tree.body if isinstance(node, ast.Assign) for x in node.targets]
    return {name: value for name, value in found if name.isupper()}


@functools.cache
def _everywhere() -> dict[str, ast.expr]:
    """Return the constant texts of the integrations."""
    trees = [tree for framework in FRAMEWORKS for _, tree, _ in statements(framework)]
    found = [item for tree in trees for item in _constants(tree).items()]
    return {
        name: value
        for name, value in found
        if isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))
    }


# Types of transformers.

MODELS = json.loads((PACKAGE / "huggingface" / "models.json").read_text(encoding="utf-8"))


def counts() -> Lines:
    """Return how many types are in which state."""
    told = Counter(states["plain"] for states in MODELS["types"].values())
    shown = ", ".join(f"{number} {state}" for state, number in told.most_common())
    return [f"transformers {MODELS['transformers']}, {MODELS['ranks']} ranks against one process in float64: {shown}."]


def refused() -> Lines:
    """Return the types that do not run, by the reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for kind, states in MODELS["types"].items():
        if states["plain"] != "exact":
            said = re.search(r"Not supported: .*?: (.*)\. What works: (.*)\.$", states["reason"])
            why, works = said.groups() if said else (f"not run: {states['reason']}", "")
            reasons.setdefault((why.replace("|", " "), works), []).append(kind)
    lines = [[", ".join(kinds), *reason] for reason, kinds in sorted(reasons.items(), key=lambda one: -len(one[1]))]
    return table(["types", "why", "what works"], lines)


def types() -> Lines:
    """Return the types that are exact however they are called, and a table of those that are not."""
    whole, lines = list[str](), list[list[str]]()
    for kind, states in MODELS["types"].items():
        cells = [states.get(section, "") for section in MODELS["sections"]]
        if set(cells) == {"exact"}:
            whole.append(kind)
        elif states["plain"] == "exact":
            lines.append([kind, *cells, states.get("reason", "").replace("|", " ")])
    text = textwrap.fill(", ".join(whole) + ".", 120, break_on_hyphens=False)
    return [text, "", *table(["type", *MODELS["sections"], "reason"], lines)]


# The house.

GROUND = {"config", "errors", "flags", "names"}
"""Imported by all: left out."""


def imports() -> dict[str, set[str]]:
    """Return for every folder of the package, and module beside them, those whose names its modules import."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        targets = found.setdefault(path.relative_to(PACKAGE).with_suffix("").parts[0], set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dfa_megatron":
                parts = (node.module or "").split(".")
                targets |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    boxes = found.keys() - GROUND - {"__init__", "launch"}
    return {here: (targets & boxes) - {here} for here, targets in found.items() if here in boxes}


def house() -> Lines:
    """Return a line for each box, below all that import it: what it imports and does not reach through another."""
    arrows = imports()

    def below(start: str) -> set[str]:
        return {start}.union(*(below(target) for target in arrows[start]))

    @functools.cache
    def depth(here: str) -> int:
        return max((depth(other) + 1 for other, targets in arrows.items() if here in targets), default=0)

    lines = []
    for here in sorted(arrows, key=lambda one: (depth(one), one)):
        direct = [one for one in arrows[here] if not any(one in below(other) for other in arrows[here] - {one})]
        lines.append(f"{here:12} -> {', '.join(sorted(direct))}".removesuffix(" -> ").rstrip())
    return ["```text", *lines, "```"]


PAGES = {
    "api": {"names": names},
    "README": {"tested": tested},
    "architecture": {"house": house},
    "huggingface": {"counts": counts, "refused": refused, "types": types},
    "options": {"options": options, "meanings": meanings},
    "refusals": {name: functools.partial(refusals, name) for name in FRAMEWORKS},
}
