"""What DDTREE uses of SGLang: every attribute and signature, checked against the installed source.

The check reads source text and imports none of the modules that it checks, so it runs before anything heavy loads
and tells all differences at once. `unanswered` compares the algorithm's class with SGLang's own: a question that a
new SGLang asks of algorithms is found at registration.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddtree.sglang_plugin.host import HOST, SUPPORTED, Uses

__all__ = [
    "differences",
    "installed_version",
    "name_tests_in",
    "refusal",
    "unanswered",
]


def installed_version() -> str | None:
    """SGLang's version, None when it is not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def differences(host: Iterable[Uses] = HOST) -> list[str]:
    """What of SGLang is not as DDTREE uses it, one line each."""
    return [line for uses in host for line in _check(uses)]


def unanswered(algorithm: type, enumeration: type) -> list[str]:
    """Questions of SGLang's built-in algorithms that the plugin's class has no answer to."""
    asked = {
        name
        for name, value in vars(enumeration).items()
        if not name.startswith("_") and callable(value) and not isinstance(value, classmethod | staticmethod)
    }
    return sorted(asked - set(dir(algorithm)))


def refusal(found: list[str]) -> str:
    """One readable message about all differences."""
    return (
        f"ddtree: this SGLang ({installed_version()}) is not as ddtree uses it; it was made for {SUPPORTED}. "
        f"Differences: {'; '.join(found)}. Install sglang=={SUPPORTED}, or a ddtree for this SGLang; to start "
        "SGLang "
        "without ddtree, set SGLANG_PLUGINS=none"
    )


def name_tests_in(source_root: Path) -> set[str]:
    """Files under sglang/srt that hold the algorithm's name as a string."""
    paths = source_root.rglob("*.py")
    return {p.relative_to(source_root).as_posix() for p in paths if '"DFLASH"' in p.read_text(encoding="utf-8")}


def _check(uses: Uses) -> Iterator[str]:
    label = f"{uses.module}.{uses.name}"
    tree = _module(uses.module)
    if tree is None:
        yield f"there is no module {uses.module}"
        return
    node = _find(tree, uses.name)
    if node is None:
        yield f"there is no {label}"
        return
    if uses.passes is not None and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _check_parameters(label, node, uses.passes)
    if uses.attributes and isinstance(node, ast.ClassDef):
        missing = [name for name in uses.attributes if name not in _attributes(node)]
        if missing:
            yield f"{label} has no {', '.join(missing)}"


def _check_parameters(
    label: str, node: ast.FunctionDef | ast.AsyncFunctionDef, passes: tuple[str, ...]
) -> Iterator[str]:
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
    keyword = [a.arg for a in arguments.kwonlyargs]
    lost = [name for name in passes if name not in (*positional, *keyword)]
    if lost and arguments.kwarg is None:
        yield f"{label} no longer takes {', '.join(lost)}"
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [a for a, default in zip(keyword, arguments.kw_defaults, strict=True) if default is None]
    new = [name for name in required if name not in passes]
    if new:
        yield f"{label} now needs {', '.join(new)}"


@lru_cache(maxsize=64)
def _module(name: str) -> ast.Module | None:
    """The parsed source of a module. Found by its path: asking Python would import the packages above it."""
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(root, *rest.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return ast.parse(candidate.read_text(encoding="utf-8"))
    return None


def _find(tree: ast.Module, dotted: str) -> ast.AST | None:
    body: list[ast.stmt] = tree.body
    found: ast.AST | None = None
    for part in dotted.split("."):
        found = next((node for node in _statements(body) if part in _names(node)), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under conditions included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Names assigned in a class, on the class or on self, and its methods."""
    names = {name for part in node.body for name in _names(part)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            names.add(part.attr)
    return names
