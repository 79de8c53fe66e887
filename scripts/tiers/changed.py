"""The tests that reach a changed module by their imports, over any number of steps."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import grimp

PACKAGES = ("skyrl_tinker", "tests")


def files(root: Path, revision: str) -> set[str]:
    """Return the paths that differ from a revision, those not yet committed too."""
    commands = (
        ["git", "diff", "--name-only", "--merge-base", revision],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    outputs = (
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
        for command in commands
    )
    return {line for output in outputs for line in output.splitlines()}


def reached_tests(root: Path, paths: Iterable[str]) -> list[str]:
    """Return the tests that import a module of these paths, are one, or have a conftest of them above."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False)
    reached = set()
    for path in paths:
        module = _module(path)
        if module in graph.modules:
            reached |= {module} | graph.find_downstream_modules(module) | _below_conftest(graph, module)
    found = {f"{module.replace('.', '/')}.py" for module in reached}
    return sorted(path for path in found if Path(path).name.startswith("test_") and (root / path).exists())


def _below_conftest(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Return the modules that pytest gives the fixtures of a conftest, without an import."""
    package, _, name = module.rpartition(".")
    return {each for each in graph.modules if each.startswith(f"{package}.")} if name == "conftest" else set()


def _module(path: str) -> str:
    return path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
