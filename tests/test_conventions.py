"""Names and docstrings of the package, as CONTRIBUTING.md asks for them."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

import skyrl_tinker
from skyrl_tinker import errors

ROOT = Path(skyrl_tinker.__file__).parent
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent.name != "pb"]
BY_RESOURCE = {"routes", "schemas", "validation", "losses"}
"""Folders with a module per resource or loss, whose names recur among them."""
LARGE = BY_RESOURCE
MOST_MODULES = 15
ODD_OPENINGS = re.compile(
    r"(about|above|after|against|among|around|as|at|before|behind|below|beneath|beside|between|beyond|by|during"
    r"|except|for|from|in|inside|into|of|off|on|onto|out|outside|over|since|through|to|toward|under|until|up"
    r"|upon|via|with|within|without"
    r"|he|her|him|his|i|it|its|itself|nobody|nothing|ours|she|somebody|someone|something|that|their|them|these"
    r"|they|this|those|us|we|whoever|whatever|you"
    r"|how|what|when|where|whether|which|who|whom|whose|why)\b",
    re.IGNORECASE,
)
"""Prepositions, pronouns and wh-words: a summary opens with its noun or with an imperative verb."""

PAGES = [*ROOT.parent.glob("[CR][OE]*.md"), *sorted(ROOT.parent.glob("docs/*.md"))]
PLAIN = {
    "the pages": PAGES,
    "the root modules": sorted(ROOT.glob("*.py")),
    **{path.parent.name: sorted(path.parent.rglob("*.py")) for path in sorted(ROOT.glob("*/__init__.py"))},
}
MOST_CLAUSES = 1.2
"""Per 1,000 words, of clauses with "what" in place of a noun: as in other projects, which have 0 to 1.2."""
UNPLAIN = re.compile(r"\b(told of|reckoned|be it|as ever|afresh|theirs|whoever)\b", re.IGNORECASE)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(path: Path) -> Iterator[Documented]:
    tree = ast.parse(path.read_text())
    return (node for node in ast.walk(tree) if isinstance(node, Documented))


def test_no_basename_occurs_twice() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.name != "__init__.py":
            places[path.name].append(path.relative_to(ROOT).as_posix())
    shared = {
        name: found
        for name, found in places.items()
        if len(found) > 1 and not all(Path(each).parent.name in BY_RESOURCE for each in found)
    }
    assert not shared


def test_scripts_that_name_their_interpreter_can_be_run() -> None:
    scripts = [path for path in (ROOT.parent / "scripts").rglob("*") if path.is_file()]
    named = [path for path in scripts if path.read_bytes().startswith(b"#!")]
    assert len(named) > len(scripts) / 4
    assert not [path.name for path in named if not path.stat().st_mode & 0o111]


def test_no_class_name_occurs_twice() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in definitions(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_no_folder_holds_more_modules_than_a_reader_can_take_in() -> None:
    sizes = defaultdict(int)
    for path in MODULES:
        sizes[path.parent] += path.name != "__init__.py"
    assert not {
        folder.relative_to(ROOT).as_posix(): size
        for folder, size in sizes.items()
        if size > MOST_MODULES and folder.name not in LARGE
    }


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"])
def test_every_package_says_what_lives_there_in_three_to_eight_lines(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert 3 <= len(text.splitlines()) <= 8


def test_the_tree_of_errors_has_all_of_them() -> None:
    lines = re.finditer(r"^([│├└─ ]*)(\w+Error) +(\d+) +(\w+)", errors.__doc__ or "", re.MULTILINE)
    told = {line[2]: (len(line[1]) // 4, int(line[3]), line[4]) for line in lines}
    root = errors.SkyrlTinkerError
    made = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, root)]
    depth = len(root.__mro__)
    assert told == {each.__name__: (len(each.__mro__) - depth, each.status, each.category) for each in made}


def test_docstrings_open_with_a_noun_or_an_imperative() -> None:
    odd = []
    for path in MODULES:
        for node in definitions(path):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if ODD_OPENINGS.match(summary.lstrip('`"')):
                line = getattr(node, "lineno", 1)
                odd.append(f"{path.relative_to(ROOT)}:{line} {getattr(node, 'name', 'module')}: {summary}")
    assert not odd, f"{len(odd)} docstrings:\n" + "\n".join(odd)


def structure() -> ModuleType:
    loader = SourceFileLoader("structure", str(ROOT.parent / "scripts" / "structure"))
    spec = spec_from_loader(loader.name, loader)
    assert spec
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_clauses_with_what_are_counted_in_sentences_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| what | why |\n\nWhat is it? It shows what waits, `what`.\n\n```sh\nwhat\n```\n")
    module = tmp_path / "module.py"
    module.write_text('"""What it does."""\nwhat = "what"  # what stays\n')
    counter = structure()
    assert counter.noun_clauses([counter.prose(page)]) == pytest.approx(1000 / 13)
    assert counter.noun_clauses([counter.prose(module)]) == pytest.approx(2000 / 6)


@pytest.mark.parametrize("part", PLAIN)
def test_prose_names_the_thing(part: str) -> None:
    counter = structure()
    texts = {path: counter.prose(path) for path in PLAIN[part]}
    assert counter.noun_clauses(list(texts.values())) <= MOST_CLAUSES
    found = {path.name: [match[0] for match in UNPLAIN.finditer(text)] for path, text in texts.items()}
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_a_page_but_tables_and_code_have_160_characters_at_most(page: Path) -> None:
    lines = structure().FENCES.sub("", page.read_text()).splitlines()
    assert not [line for line in lines if len(line) > 160 and not line.startswith("|")]
