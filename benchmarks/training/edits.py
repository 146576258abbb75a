"""Code edits as conversations: the answer repeats the code with one change."""

from __future__ import annotations

import ast
import keyword
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Chat = tuple[str, str]
NAMES = (
    "value result total count item data index name key left right first second number text "
    "buffer size width height price amount score level path node entry"
)
REPEATS = ("Repeat this code.", "Write this code again without any change.")
RENAMES = (
    "Rename `{}` to `{}`.",
    "Rename the variable {} to {} in this code.",
    "Change the name {} to {} and keep everything else.",
)
NUMBER = re.compile(r"(?<![\w.])\d{1,4}(?![\w.])")
OPERATIONS = {
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "divide": "a / b",
    "power": "a ** b",
    "modulo": "a % b",
    "maximum": "max(a, b)",
    "minimum": "min(a, b)",
    "average": "(a + b) / 2",
    "difference": "abs(a - b)",
}
ADDITIONS = (
    "Add a {0} `{1}`.",
    "Add a {1} {0} to this calculator.",
    "Extend this code with a {0} named {1}. Answer with the whole code.",
)


@dataclass(frozen=True)
class Edit:
    """An instruction, and the code before and after."""

    instruction: str
    before: str
    after: str

    def chat(self, choose: random.Random) -> Chat:
        """Make a conversation; the instruction precedes the code in 70 % of them."""
        code = f"```python\n{self.before}\n```"
        first = choose.random() < 0.7
        parts = (self.instruction, code) if first else (code, self.instruction)
        return "\n\n".join(parts), f"```python\n{self.after}\n```"


def code_edits(files: Sequence[str], choose: random.Random, num_pieces: int) -> list[Chat]:
    """Make edits of functions and classes; a drawn edit may not apply to a piece."""
    found, pieces = [], 0
    for text in files:
        for source in pieces_of(text, choose):
            if pieces == num_pieces:
                return found
            pieces += 1
            if edit := edit_of(source, choose):
                found.append(edit.chat(choose))
    return found


def pieces_of(text: str, choose: random.Random) -> Iterator[str]:
    """Return half of the short functions and classes of a file, dedented."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    # Split lines as the parser does; splitlines would also split at form feeds.
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and 4 <= height(node) < 45:
            own = lines[node.lineno - 1 : node.end_lineno]
            indented = all(not line[: node.col_offset].strip() for line in own)
            source = "\n".join(line[node.col_offset :].rstrip("\r") for line in own)
            if indented and len(source) <= 1500 and choose.random() < 0.5:
                yield source


def height(node: ast.FunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def edit_of(source: str, choose: random.Random) -> Edit | None:
    try:
        (node,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        # A piece may not be valid code outside its context.
        return None
    drawn = choose.random()
    if isinstance(node, ast.ClassDef):
        return added_method(source, node, choose) if drawn < 0.6 else None
    if drawn < 0.45:
        return renamed_variable(source, node, choose)
    if drawn < 0.65:
        return changed_number(source, choose)
    if drawn < 0.8:
        return without_docstring(source, node)
    if drawn < 0.9:
        return Edit(choose.choice(REPEATS), source, source)
    return renamed_function(source, node)


def added_method(source: str, node: ast.ClassDef, choose: random.Random) -> Edit | None:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    if len(methods) < 3:
        return None
    method = choose.choice(methods[1:])
    first = min([method.lineno, *(item.lineno for item in method.decorator_list)])
    lines = source.split("\n")
    before = lines[: first - 1] + lines[method.end_lineno :]
    return Edit(f"Add the method `{method.name}`.", "\n".join(before).rstrip(), source)


def renamed_variable(source: str, node: ast.AST, choose: random.Random) -> Edit | None:
    """Rename a parameter or local variable, except in strings and comments."""
    places: dict[str, list[tuple[int, int]]] = {}
    stored = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Name | ast.arg):
            name = item.id if isinstance(item, ast.Name) else item.arg
            places.setdefault(name, []).append((item.lineno, item.col_offset))
            if isinstance(item, ast.arg) or isinstance(item.ctx, ast.Store):
                stored.add(name)
    names = [n for n in sorted(stored - {"self", "cls"} - named_otherwise(node)) if len(n) > 1]
    if not names:
        return None
    old, new = choose.choice(names), choose.choice(NAMES.split())
    if keyword.iskeyword(old) or re.search(rf"\b{new}\b", source):
        return None
    after = with_name(source, places[old], old, new)
    return Edit(choose.choice(RENAMES).format(old, new), source, after)


def named_otherwise(node: ast.AST) -> set[str]:
    """Return names in f-strings, which lack positions, and in statements that hold them as text."""
    found: set[str] = set()
    for item in ast.walk(node):
        if isinstance(item, ast.JoinedStr):
            found |= {inner.id for inner in ast.walk(item) if isinstance(inner, ast.Name)}
        elif not isinstance(item, ast.Name | ast.arg | ast.Attribute | ast.keyword | ast.Constant):
            for _, value in ast.iter_fields(item):
                values = value if isinstance(value, list) else [value]
                found |= {one for one in values if isinstance(one, str)}
    return found


def with_name(source: str, places: list[tuple[int, int]], old: str, new: str) -> str:
    """Replace a name; places are lines from 1 and columns in bytes, as in ``ast``."""
    lines = [line.encode() for line in source.split("\n")]
    for number, column in sorted(places, reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:column] + new.encode() + line[column + len(old.encode()) :]
    return b"\n".join(lines).decode()


def changed_number(source: str, choose: random.Random) -> Edit | None:
    """Change a number that occurs once."""
    found = list(NUMBER.finditer(source))
    if not found:
        return None
    old, new = choose.choice(found), str(choose.randrange(2, 100))
    if new == old[0] or sum(match[0] == old[0] for match in found) > 1:
        return None
    after = source[: old.start()] + new + source[old.end() :]
    return Edit(f"Change {old[0]} to {new} in this code.", source, after)


def without_docstring(source: str, node: ast.FunctionDef) -> Edit | None:
    if not ast.get_docstring(node) or len(node.body) < 2:
        return None
    docstring, lines = node.body[0], source.split("\n")
    after = lines[: docstring.lineno - 1] + lines[docstring.end_lineno :]
    return Edit("Remove the docstring.", source, "\n".join(after))


def renamed_function(source: str, node: ast.FunctionDef) -> Edit | None:
    if len(re.findall(rf"\b{node.name}\b", source)) != 1:
        return None
    new = "compute_" + node.name.strip("_")
    after = re.sub(rf"\bdef {node.name}\b", f"def {new}", source)
    return Edit(f"Rename the function to `{new}`.", source, after)


@dataclass(frozen=True)
class Calculator:
    """The style of a generated calculator."""

    class_name: str
    operands: tuple[str, str]
    is_class: bool
    has_docstrings: bool
    has_checks: bool

    def code(self, operations: Sequence[str]) -> str:
        head = f"class {self.class_name}:\n" if self.is_class else ""
        between = "\n" if self.is_class else "\n\n"
        return (head + between.join(map(self.function, operations))).rstrip()

    def function(self, operation: str) -> str:
        indent = "    " if self.is_class else ""
        operands = dict(zip("ab", self.operands, strict=True))
        result = re.sub(r"\b[ab]\b", lambda found: operands[found[0]], OPERATIONS[operation])
        receiver = "self, " if self.is_class else ""
        lines = [f"def {operation}({receiver}{', '.join(self.operands)}):"]
        if self.has_docstrings:
            lines.append(f'    """Return the result of {operation}."""')
        if self.has_checks and operation in ("divide", "modulo"):
            lines.append(f"    if {self.operands[1]} == 0:")
            lines.append('        raise ValueError("cannot divide by zero")')
        lines.append(f"    return {result}")
        return "".join(f"{indent}{line}\n" for line in lines)


def calculator_edits(choose: random.Random, count: int) -> list[Chat]:
    return [calculator_edit(choose).chat(choose) for _ in range(count)]


def calculator_edit(choose: random.Random) -> Edit:
    operations = choose.sample(sorted(OPERATIONS), choose.randrange(2, 6))
    operands = choose.sample(["a", "b", "x", "y", "first", "second", "left", "right"], 2)
    written = Calculator(
        choose.choice(["Calculator", "SimpleCalculator", "Calc"]),
        (operands[0], operands[1]),
        is_class=choose.random() < 0.7,
        has_docstrings=choose.random() < 0.5,
        has_checks=choose.random() < 0.3,
    )
    kind, before = "method" if written.is_class else "function", written.code(operations)
    drawn, old = choose.random(), choose.choice(operations)
    if drawn < 0.4:
        new = choose.choice([name for name in OPERATIONS if name not in operations])
        ask = choose.choice(ADDITIONS).format(kind, new)
        return Edit(ask, before, written.code([*operations, new]))
    if drawn < 0.6:
        kept = [name for name in operations if name != old]
        return Edit(f"Remove the {kind} `{old}`.", before, written.code(kept))
    if drawn < 0.8:
        after = re.sub(rf"\bdef {old}\b", f"def compute_{old}", before)
        return Edit(f"Rename the {kind} {old} to compute_{old}.", before, after)
    return Edit(choose.choice(REPEATS), before, before)
