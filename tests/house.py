"""What the house is made of, read from its source: folders, imports, circles and the counts that a reader feels.

`python -m tests.house` prints the counts. `python -m tests.house --write` brings the drawings in docs/architecture.md
up to date; `tests/test_house.py` fails while they are not.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
VERBS = tuple(
    f"safe_loading.{verb}"
    for verb in (
        "_loading.load_peft_on_rank",
        "_merging.merge_lora_inplace",
        "_merging.merge_lora_checkpoint",
        "_sharding.wrap_fsdp_meta_safe",
        "_wrapping.wrap_transparent",
        "_memory.plan_device_map",
    )
)
# Lower may not import higher.
ORDER = (
    "errors",
    "_core",
    "_checkpoint",
    "_output",
    "_ranks",
    "_model/formats",
    "_model/quantized",
    "_model",
    "_model/layout",
    "_loading",
    "_merging/weights",
    "_merging/disk",
    "_merging",
    "_sharding",
    "_wrapping",
    "_memory/trace",
    "_memory/plan",
    "_memory/forecast",
    "_memory/audit",
    "_memory",
    "_doctor",
    "__init__",
    "_demo",
    "_commands",
    "__main__",
)
LEVEL = {room: level for level, room in enumerate(ORDER)}


class House:
    """The modules of a package by their dotted names, as syntax trees."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.files = {self._name(path): path for path in sorted(package.rglob("*.py"))}
        self.sources = {name: path.read_text(encoding="utf-8") for name, path in self.files.items()}

    @cached_property  # for those who only collect the tests of the house
    def trees(self) -> dict[str, ast.Module]:
        """The syntax tree of each module."""
        return {name: ast.parse(source) for name, source in self.sources.items()}

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self.package.parent).with_suffix("").parts).removesuffix(".__init__")

    def room(self, name: str) -> str:
        """The folder of a module, with slashes; modules beside no others are rooms of their own."""
        inside = self.files[name].relative_to(self.package)
        return inside.parent.as_posix() if len(inside.parts) > 1 else inside.stem

    def imports(self, name: str, tree: ast.AST | None = None) -> Iterator[str]:
        """The modules of the package that a module imports, wherever in it the import stands."""
        path = self.files[name]
        package = list(path.relative_to(self.package.parent).parent.parts)
        for node in ast.walk(tree or self.trees[name]):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                targets = [f"{module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                while target not in self.files and "." in target:
                    target = target.rpartition(".")[0]
                if target in self.files:
                    yield target

    def stands_on(self, name: str) -> set[str]:
        """The modules that a module imports, directly or by way of others, and itself; not the public face."""
        found, waiting = {name}, [name]
        while waiting:
            new = set(self.imports(waiting.pop())) - found - {"safe_loading"}
            found |= new
            waiting += new
        return found

    def lines(self, names: Iterable[str]) -> int:
        """The lines of some modules."""
        return sum(self.sources[name].count("\n") for name in names)

    def upward(self, name: str, tree: ast.AST | None = None) -> set[str]:
        """The modules that stand higher than the one that imports them."""
        level = LEVEL[self.room(name)]
        return {other for other in self.imports(name, tree) if LEVEL[self.room(other)] > level}

    def circles(self) -> list[list[str]]:
        """Groups of files that import one another, directly or by way of others."""
        return circles({name: set(self.imports(name)) - {name} for name in self.files})

    def rooms(self) -> dict[str, set[str]]:
        """For each top folder the others that it imports."""
        found: dict[str, set[str]] = {room.partition("/")[0]: set() for room in ORDER}
        for name in self.files:
            top = self.room(name).partition("/")[0]
            found[top] |= {self.room(other).partition("/")[0] for other in self.imports(name)} - {top}
        return found

    def tree(self) -> str:
        """Every folder and file with the first sentence of its docstring."""
        lines = [f"{self.package.name}/"]
        for folder in (self.package, *sorted(path for path in self.package.rglob("*") if path.is_dir())):
            files = sorted(folder.glob("*.py"))
            if not files:
                continue
            depth = len(folder.relative_to(self.package).parts)
            if depth:
                lines += [
                    "",
                    f"{'  ' * depth}{folder.name + '/':<{30 - 2 * depth}}{self._says(folder / '__init__.py')}",
                ]
            for path in files:
                if path.name != "__init__.py" or not depth:
                    lines.append(f"{'  ' * (depth + 1)}{path.name:<{28 - 2 * depth}}{self._says(path)}")
        return "\n".join(line.rstrip() for line in lines)

    def _says(self, path: Path) -> str:
        text = " ".join((ast.get_docstring(self.trees[self._name(path)]) or "").partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", text)[0].rstrip(".")
        return sentence[:1].lower() + sentence[1:] if not sentence[1:2].isupper() else sentence

    def arrows(self) -> str:
        """The top folders from the highest to the lowest, each with those that it imports."""
        level = {room.partition("/")[0]: level for room, level in LEVEL.items()}
        rows = []
        for room, others in reversed(self.rooms().items()):
            names = sorted(others, key=lambda other: -level[other])
            rows.append(f"{room:<14}{', '.join(names) if room != '__init__' else 'every verb, when it is asked for'}")
        return "\n".join(row.rstrip() for row in rows)

    def twice(self) -> dict[str, list[str]]:
        """The names of classes that more than one module defines."""
        found = defaultdict(list)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
        return {name: modules for name, modules in found.items() if len(modules) > 1}

    def functions(self) -> list[tuple[int, str]]:
        """The lines of every function without its docstring and signature, longest first."""
        return sorted(
            (
                (_length(node), f"{name}.{node.name}")
                for name, tree in self.trees.items()
                for node in ast.walk(tree)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            ),
            reverse=True,
        )

    def count(self, word: str) -> int:
        """How often a name stands in the code."""
        return sum(
            isinstance(node, ast.Name) and node.id == word for tree in self.trees.values() for node in ast.walk(tree)
        )

    def comments(self) -> int:
        """The lines that hold nothing but a comment."""
        return sum(
            token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
            for path in self.files.values()
            for token in tokenize.generate_tokens(path.open(encoding="utf-8").readline)
        )


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach one another."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            for following in graph.get(waiting.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        reach[start] = seen
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    documented = len((ast.get_docstring(node, clean=False) or "").splitlines())
    signature = node.body[0].lineno - node.lineno
    return (node.end_lineno or 0) - node.lineno + 1 - documented - signature


def drawn(text: str, house: House) -> str:
    """The page of the architecture with both drawings as they are now."""
    for mark, drawing in (("tree", house.tree()), ("imports", house.arrows())):
        block = f"<!-- {mark} -->\n```text\n{drawing}\n```\n<!-- end of {mark} -->"
        text = re.sub(rf"<!-- {mark} -->.*?<!-- end of {mark} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def main() -> None:
    """Print the counts, or write the drawings."""
    house = House(ROOT / "safe_loading")
    if "--write" in sys.argv:
        ARCHITECTURE.write_text(drawn(ARCHITECTURE.read_text(encoding="utf-8"), house), encoding="utf-8")
        return
    lines = house.lines(house.files)
    arrows = {(house.room(name), house.room(other)) for name in house.files for other in house.imports(name)}
    longest = max(house.sources, key=lambda name: house.sources[name].count("\n"))
    length, function = house.functions()[0]
    for what, figure in {
        "entries of the package": len({path.relative_to(house.package).parts[0] for path in house.files.values()}),
        "files": len(house.files),
        "lines": lines,
        "longest file": f"{house.sources[longest].count(chr(10))} ({longest})",
        "longest function, body": f"{length} ({function})",
        "arrows between folders": sum(one != other for one, other in arrows),
        "arrows upward": sum(len(house.upward(name)) for name in house.files if name != "safe_loading"),
        "circles of files": len(house.circles()),
        "classes defined twice": len(house.twice()),
        "Any": house.count("Any"),
        "own-line comments": f"{house.comments()} ({100 * house.comments() / lines:.1f} %)",
    }.items():
        print(f"{what:<26}{figure}")
    print("\nfiles and lines that a verb stands on")
    for verb in VERBS:
        under = house.stands_on(verb)
        print(f"{verb.rpartition('.')[2]:<26}{len(under):>3}{house.lines(under):>8}")


if __name__ == "__main__":
    main()
