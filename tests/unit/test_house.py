"""Files are doors, folders are rooms: what lies where in src/reshard, and who may ask what."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import reshard

tomllib = pytest.importorskip("tomllib")

ROOT = Path(reshard.__file__).parent
REPOSITORY = ROOT.parents[1]
DOORS_OF_DCP = {module.name for module in pkgutil.iter_modules(dcp.__path__)}
OUR_DOORS = {"__init__", "checkpoints", "manager", "object_storage", "patching", "policies"}
OUR_DOORS |= {"rank_values"}
DOORS_OF_NEWER_DCP = {"fsspec_filesystem", "protocol"}
"""Of torch 2.15."""
DOORS_OF_NEWER_DCP |= {"_consolidate_hf_safetensors", "_pg_transport", "quantized_hf_storage"}
"""Those that torch 2.8 has not."""
SHIMS = {
    "_dedup_save_plans",
    "_dedup_tensors",
    "_extension",
    "_fsspec_filesystem",
    "_nested_dict",
    "_pg_transport",
    "_sharded_tensor_utils",
    "_storage_utils",
    "_traverse",
    "_version",
    "logging_handlers",
    "planner_helpers",
    "resharding",
    "state_dict",
    "utils",
}
MOST_LINES_OF_A_SHIM = 20
MOST_LINES = 600
MOST_LAYERS = 8


def modules() -> list[Path]:
    found = sorted(ROOT.rglob("*.py"))
    assert len(found) > 50
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def test_every_file_at_the_top_is_a_door() -> None:
    doors = {path.stem for path in ROOT.glob("*.py")}
    assert doors - DOORS_OF_DCP - DOORS_OF_NEWER_DCP == OUR_DOORS


def test_no_room_has_the_name_of_a_door_of_dcp() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert len(rooms) > 8
    assert rooms & DOORS_OF_DCP == set()


@pytest.mark.parametrize("shim", sorted(SHIMS))
def test_a_shim_only_hands_on(shim: str) -> None:
    source = (ROOT / f"{shim}.py").read_text()
    own = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "__getattr__"
    ]
    assert own == []
    assert len(source.splitlines()) <= MOST_LINES_OF_A_SHIM


def test_no_module_is_too_long_to_follow() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in modules()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_the_layers_are_few_and_name_every_module() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    assert contract["exhaustive"]
    assert len(contract["layers"]) <= MOST_LAYERS


# Questions that only one room may ask


def asks_whose_class(source: str) -> Iterator[str]:
    """Every isinstance with, and comparison to a method of, a default planner or storage."""
    ours = ("DefaultSavePlanner", "DefaultLoadPlanner", "FileSystemWriter", "FileSystemReader")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                asked: list[ast.expr] = [kinds]
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[right]):
                asked = [left, right]
            case _:
                continue
        for each in asked:
            for inner in ast.walk(each):
                if isinstance(inner, ast.Name) and inner.id in ours:
                    yield f"line {node.lineno}: {inner.id}"


def asks_for_untouched(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "untouched":
            yield f"line {node.lineno}: untouched"


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(planner, DefaultSavePlanner)",
        "isinstance(planner, Other | DefaultLoadPlanner)",
        "isinstance(writer, (A, FileSystemWriter))",
        "type(planner).finish_plan is DefaultSavePlanner.finish_plan",
        "FileSystemReader.prepare_global_plan is not own",
        "type(writer) is FileSystemWriter",
    ],
)
def test_the_scan_sees_every_way_to_ask_whose_class_it_is(source: str) -> None:
    assert [*asks_whose_class(source)]


def test_the_scan_sees_who_asks_whether_a_list_is_untouched() -> None:
    assert [*asks_for_untouched("if items.untouched: pass")]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_plans_asks_whose_planner_or_storage_it_is(path: Path) -> None:
    if path.parent.name == "plans":
        return
    source = path.read_text()
    assert [*asks_whose_class(source), *asks_for_untouched(source)] == []
