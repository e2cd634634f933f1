"""The source tree as the structure tests see it: every module parsed, with its dotted name and what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "laminar_hpc"


class Violation(NamedTuple):
    """A broken rule at a line of a module."""

    line: int
    text: str


class Import(NamedTuple):
    """One imported name: `target` is dotted, as in "laminar_hpc.errors.ConfigError" or "h5py"."""

    line: int
    target: str

    @property
    def library(self) -> str:
        """The top-level package."""
        return self.target.partition(".")[0]


class Module:
    """One parsed file. `name` is dotted: jobs/train.py is installed as, and so is, laminar_hpc.jobs.train."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        parts = Path(path).with_suffix("").parts
        if parts[0] in ("jobs", "analysis"):
            parts = (PACKAGE, *parts)
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(source, path)

    @property
    def folder(self) -> str:
        """The second part of the name, "" for the package itself."""
        return folder_of(self.name)

    def imports(self) -> list[Import]:
        """Everything imported anywhere in the module, inside functions too."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                found += [Import(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        return found

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with its dotted callee as written ("os.system"), "" where that is no dotted name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node, dotted(node.func)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        above = package[: len(package) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


def folder_of(name: str) -> str:
    """The second part of a dotted name of the package, "" for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def dotted(node: ast.expr) -> str:
    """A chain of attributes as it is written, or "" where it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_docstring(node: ast.stmt) -> bool:
    """Whether the statement is nothing but a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and value of every string that is more than documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


@cache
def package_modules() -> tuple[Module, ...]:
    """All modules that are installed: the package, jobs and analysis."""
    return _modules(PACKAGE, "jobs", "analysis")


@cache
def modules_of_tests() -> tuple[Module, ...]:
    """All modules under tests."""
    return _modules("tests")


def _modules(*folders: str) -> tuple[Module, ...]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)
