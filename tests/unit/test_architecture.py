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


TORCH_PRIVATE = {
    # Of DTensor, ShardedTensor and storages, whatever the object is called.
    *("_cdata", "_indices", "_local_tensor", "_process_group", "_spec", "_values"),
    *("_init_from_local_shards", "_init_from_local_shards_and_global_metadata"),
}
MAY_NAME_TORCH_PRIVATE = {
    # Stand for modules of DCP's, under their own names.
    *("_extension.py", "patching.py"),
    # Names that stand in files of torch's; nothing is looked up by them.
    *("foreign/dcp.py", "format/torch_zip.py"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of an expression that is just that, or the empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            before = dotted_name(value)
            return f"{before}.{attribute}" if before else ""
    return ""


def torch_private_names(source: str) -> list[str]:
    """Imports and attributes that torch does not promise to keep, with their lines."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    found: list[tuple[int, str]] = []

    def check(line: int, name: str) -> None:
        first, *rest = name.split(".")
        if first == "torch" and any(map(is_private, rest)):
            found.append((line, name))

    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    check(node.lineno, alias.name)
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    check(node.lineno, f"{module}.{alias.name}")
                    aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
            case ast.Constant(value=str(text)):
                # For getattr and import_module.
                check(node.lineno, text)
                if text in TORCH_PRIVATE:
                    found.append((node.lineno, text))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attribute) if attribute in TORCH_PRIVATE:
                # `self._spec` is an attribute of ours.
                if dotted_name(node.value) != "self":
                    found.append((node.lineno, attribute))
            case ast.Attribute(attr=attribute) if is_private(attribute):
                first, _, rest = dotted_name(node).partition(".")
                check(node.lineno, f"{aliases.get(first, first)}.{rest}")
    return [f"{line}: {name}" for line, name in sorted(set(found))]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "import torch.distributed._shard as shards",
        "from torch.distributed._functional_collectives import AsyncCollectiveTensor",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "def f():\n    from torch._C import _nope",
        "import torch\nx = torch._neg_view(y)",
        "import torch as t\nx = t._foreach_copy_(a, b)",
        "import torch.distributed as dist\nx = dist.distributed_c10d._get_default_group()",
        "from torch import distributed\nx = distributed._make()",
        "local = value._local_tensor",
        "mesh = self.tensor._spec.mesh",
        "local = getattr(value, '_local_tensor', value)",
        "importlib.import_module('torch.distributed.tensor._shards_wrapper')",
        "storage = make()._cdata",
    ],
)
def test_the_scan_sees_every_way_to_reach_what_is_private_to_torch(source: str) -> None:
    assert torch_private_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.__version__",
        "import torch\nx = torch.nn.Module.__init__",
        "from reshard._traverse import get_element",
        "from __future__ import annotations",
        "self._values = self._spec = 1",
        "channel._open()",
        "from torch.distributed.tensor import DTensor\nx = DTensor.from_local(y)",
    ],
)
def test_the_scan_does_not_take_our_names_for_those_of_torch(source: str) -> None:
    assert torch_private_names(source) == []


def test_only_tensors_names_what_is_private_to_torch() -> None:
    root = Path(reshard.__file__).parent
    found = {
        str(path.relative_to(root)): names
        for path in sorted(root.rglob("*.py"))
        if (names := torch_private_names(path.read_text()))
    }
    outside = {path for path in found if not path.startswith("tensors/")}
    assert {path: found[path] for path in outside - MAY_NAME_TORCH_PRIVATE} == {}
    # An exception that is none any more, and a scan that finds nothing, are defects as well.
    assert outside == MAY_NAME_TORCH_PRIVATE
    assert "tensors/shards.py" in found
