"""Every launch says whether products are fused with sums: newer Tritons have another default."""

from __future__ import annotations

import ast

from helpers.sources import nodes_of, package_sources

SAYS_SO = {"FUSED", "pdl_options", "enable_fp_fusion"}


def is_launch(node: ast.AST) -> bool:
    """Whether it is ``kernel[grid](...)``, by the name of the kernel."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
        return False
    return ast.unparse(node.func.value).split(".")[-1].endswith("kernel")


def names_of(node: ast.AST) -> set[str]:
    """The names in an expression, and its strings and keywords."""
    inside = list(ast.walk(node))
    names = {one.id for one in inside if isinstance(one, ast.Name)}
    keywords = {one.arg for one in inside if isinstance(one, ast.keyword) and one.arg}
    return names | keywords | {str(one.value) for one in inside if isinstance(one, ast.Constant)}


def says_so(launch: ast.Call, function: ast.FunctionDef) -> bool:
    """Whether its options do, or what its function assigns to their names."""
    known = set[str]().union(*(names_of(option) for option in launch.keywords))
    assigned = [one for one in ast.walk(function) if isinstance(one, ast.Assign)]
    for _ in assigned:
        for one in assigned:
            if known & set().union(*map(names_of, one.targets)):
                known |= names_of(one.value)
    return bool(known & SAYS_SO)


def test_every_launch_says_whether_products_are_fused_with_sums():
    launches = [
        (f"{path}:{node.lineno}", says_so(node, function))
        for path, source in package_sources().items()
        for function in nodes_of(source)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if is_launch(node)
    ]
    assert len(launches) > 75
    assert [place for place, said in launches if not said] == []
