"""Rules about what may import what, beyond the layers that import-linter checks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reshard

PLANNING = Path(reshard.__file__).parent / "planning"


def imported_modules(source: str) -> set[str]:
    """Every module that `source` may import, at its top or within a function.

    `from a import b` may mean the module a.b, and a name used as `torch.distributed.x`
    needs no import of its own; both count.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found.update(alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names) if module:
                found.add(module)
                found.update(f"{module}.{alias.name}" for alias in names)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found.add(f"{name}.{attribute}")
    return found


def speaks_to_other_ranks(module: str) -> bool:
    return module == "torch.distributed" or module.startswith("torch.distributed.")


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed.tensor as dt",
        "from torch import distributed as dist",
        "from torch.distributed import tensor",
        "def f():\n    from torch.distributed.tensor import DTensor",
        "import torch\nx = torch.distributed.get_rank()",
    ],
)
def test_the_scan_sees_every_way_to_reach_torch_distributed(source: str) -> None:
    assert any(map(speaks_to_other_ranks, imported_modules(source)))


def test_no_module_of_planning_imports_torch_distributed() -> None:
    modules = sorted(PLANNING.rglob("*.py"))
    assert len(modules) > 5
    guilty = [
        f"{path.name}: {module}"
        for path in modules
        for module in sorted(imported_modules(path.read_text()))
        if speaks_to_other_ranks(module)
    ]
    assert guilty == []


FACTORIES = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"}
FACTORIES |= {"ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}


def factories_without_a_device(source: str) -> list[int]:
    """The lines that make a tensor wherever `torch.set_default_device` says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords
            ) if name in FACTORIES and all(keyword.arg != "device" for keyword in keywords):
                found.append(node.lineno)
    return found


def test_the_scan_sees_a_factory_without_a_device() -> None:
    source = "import torch\nx = torch.zeros(3)\ny = torch.zeros(3, device='cpu')"
    assert factories_without_a_device(source) == [2]


def test_every_tensor_that_we_make_says_on_which_device() -> None:
    root = Path(reshard.__file__).parent
    guilty = [
        f"{path.relative_to(root)}:{line}"
        for path in sorted(root.rglob("*.py"))
        for line in factories_without_a_device(path.read_text())
    ]
    assert guilty == []
