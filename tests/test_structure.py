"""Imports point one way: as the diagram in docs/structure.md says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAZY = {("client", "actors")}
"""Imported where it is called, never with the module."""


def layers() -> list[set[str]]:
    """Parts by layer, the highest first."""
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    diagram = re.search(r"^    cli.*->.*(\n .*->.*)*", text, re.MULTILINE)
    assert diagram is not None
    return [set(re.findall(r"\w+", layer)) for layer in diagram[0].split("->")]


def part_of(module: str) -> str | None:
    """`fmoe_ray.maps.store` -> maps; None for what is no part: the package itself, the core."""
    found = re.match(r"fmoe_ray\.([a-z]\w*)", module)
    return None if found is None else found[1]


def imports(tree: ast.AST, is_lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Modules, and whether they are imported inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", is_lazy) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from imports(node, is_lazy or inside)


def wrong(part: str, tree: ast.AST) -> list[str]:
    height = {name: -index for index, layer in enumerate(layers()) for name in layer}
    found = []
    for module, is_lazy in imports(tree):
        other = part_of(module)
        if other is None or other == part or (is_lazy and (part, other) in LAZY):
            continue
        if height[other] >= height[part]:
            found.append(f"{part} imports {module}")
    return found


def sources() -> Iterator[tuple[str, Path]]:
    """Each file with its part; `fmoe_ray/actors` is a link to `actors`."""
    for path in sorted((ROOT / "actors").rglob("*.py")):
        yield "actors", path
    for path in sorted((ROOT / "fmoe_ray").rglob("*.py")):
        part = path.relative_to(ROOT / "fmoe_ray").parts[0].removesuffix(".py")
        if part not in ("actors", "__init__"):
            yield part, path


def test_every_part_stands_in_the_diagram_once() -> None:
    names = [name for layer in layers() for name in layer]
    assert sorted(names) == sorted({part for part, _ in sources()})


def test_imports_point_downwards() -> None:
    found = {
        str(path.relative_to(ROOT)): mistakes
        for part, path in sources()
        if (mistakes := wrong(part, ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


def test_an_import_that_points_up_would_be_found() -> None:
    upwards = ast.parse("def f():\n    from fmoe_ray.engine.engine import Engine")
    assert wrong("maps", upwards) == ["maps imports fmoe_ray.engine.engine.Engine"]
    assert wrong("models", ast.parse("import fmoe_ray.gates")) == ["models imports fmoe_ray.gates"]
    eager = ast.parse("from fmoe_ray.actors.client import HandleTransport")
    assert len(wrong("client", eager)) == 1
    assert wrong("engine", ast.parse("from fmoe_ray.maps import MapStore")) == []
