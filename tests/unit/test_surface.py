"""Ours accepts every call that torch.distributed.checkpoint accepts.

What differs on purpose stands in docs/differences.md, which is read here.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import reshard
from reshard import api
from support.differences import DEMONSTRATIONS, Library

# Names that torch does not list in an __all__ but that people import all the same.
ALSO_USED = {
    "": [name for name in vars(dcp) if not name.startswith("_")],
    "api": ["_wrap_exception", "_is_wrapped_exception", "WRAPPED_EXCEPTION"],
    "metadata": ["STATE_DICT_TYPE", "STORAGE_TYPES"],
    "default_planner": [
        "_EmptyStateDictLoadPlanner",
        "_create_default_local_metadata",
        "_validate_global_plan",
        "_create_read_items",
        "_create_write_items",
        "_flatten_sharded_tensors",
    ],
    "planner_helpers": [
        "_create_write_items",
        "_create_read_items",
        "_init_state_dict",
        "_create_default_metadata_only_plan",
        "_create_write_item_for_tensor",
        "_create_write_item_for_shard",
        "_create_write_item_for_bytesio",
        "_create_read_item_for_tensor",
        "_create_read_item_for_byteio",
        "_create_chunk_from_tensor",
        "_create_chunk_list",
        "_compare_save_plans",
        "_contains_usable_plan",
        "_merge_delta_local_plans",
    ],
    "utils": [
        "_DistWrapper",
        "_get_failure_dict",
        "_all_gather_keys",
        "_create_file_view",
        "_profile",
        "_api_bc_check",
        "CheckpointException",
    ],
    "state_dict": ["_init_optim_state", "_patch_model_state_dict", "_get_fqns"],
    "state_dict_saver": ["Stateful"],
    "state_dict_loader": ["Stateful"],
    "filesystem": ["CURRENT_DCP_VERSION"],
    "_nested_dict": ["flatten_state_dict", "unflatten_state_dict", "FLATTEN_MAPPING"],
    "_traverse": ["OBJ_PATH"],
    "_sharded_tensor_utils": ["_flatten_sharded_tensors"],
    "hf_storage": ["CUSTOM_METADATA_KEY", "SAVED_OFFSETS_KEY", "SUFFIX", "_HFStorageInfo"],
    "_hf_utils": [
        "CUSTOM_METADATA_KEY",
        "DATA_OFFSETS_KEY",
        "DTYPE_KEY",
        "SAVED_OFFSETS_KEY",
        "SHAPE_KEY",
        "SUFFIX",
        "_HFStorageInfo",
        "_gen_file_name",
        "_get_dcp_custom_metadata",
        "_get_dtype",
        "_get_safetensors_file_metadata",
        "_metadata_fn",
    ],
    # Others of that module are only ever exchanged for something else, not called.
    "_consolidate_hf_safetensors": [
        "_consolidate_safetensors_files",
        "_write_sub_tensor_to_file_optimized",
        "consolidate_safetensors_files",
        "consolidate_safetensors_files_on_every_rank",
    ],
}
MODULES = [
    "",
    "api",
    "metadata",
    "planner",
    "storage",
    "stateful",
    "staging",
    "optimizer",
    "state_dict",
    "format_utils",
    "default_planner",
    "planner_helpers",
    "utils",
    "_nested_dict",
    "_traverse",
    "_dedup_save_plans",
    "_dedup_tensors",
    "_extension",
    "_sharded_tensor_utils",
    "filesystem",
    "state_dict_saver",
    "state_dict_loader",
    "hf_storage",
    "quantized_hf_storage",
    "_hf_utils",
    "_consolidate_hf_safetensors",
]
# Name -> the feature that brings it. Shrinks as features land; a stale entry fails.
NOT_YET = {
    "_traverse.print_tensor": "command line",
    "filesystem.FileSystem": "stores",
    "filesystem.FileSystemBase": "stores",
    "filesystem.SerializationFormat": "stores",
}
# Modules that no user code imports from: logging of torch's own, and a geometry helper.
INTERNAL = {"logger", "logging_handlers", "resharding"}
DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"


def all_modules() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(dcp.__path__)}


def theirs_of(module: str) -> Any:
    return importlib.import_module(f"torch.distributed.checkpoint.{module}".rstrip("."))


def ours_of(module: str) -> Any:
    return importlib.import_module(f"reshard.{module}".rstrip("."))


def public_names(module: str) -> list[str]:
    theirs = theirs_of(module)
    names = [*getattr(theirs, "__all__", []), *ALSO_USED.get(module, [])]
    return [name for name in names if not inspect.ismodule(getattr(theirs, name))]


def qualified(module: str, name: str) -> str:
    return f"{module}.{name}".lstrip(".")


ALL_NAMES = [(module, name) for module in MODULES for name in public_names(module)]
PRESENT = [pair for pair in ALL_NAMES if qualified(*pair) not in NOT_YET]


# What a difference is


def same(ours: Any, theirs: Any) -> bool:
    """Whether two defaults mean the same: members of enums have the same name, say."""
    if isinstance(theirs, enum.Enum) and isinstance(ours, enum.Enum):
        return (ours.name, ours.value) == (theirs.name, theirs.value)
    if dataclasses.is_dataclass(theirs) and dataclasses.is_dataclass(ours):
        return vars(ours) == vars(theirs)
    return bool(ours == theirs)


def parameter_problems(theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    """Why some call of `theirs` would not be understood the same way by `ours`."""
    problems = []
    our_parameters = list(ours.parameters.values())
    by_name = ours.parameters
    for position, parameter in enumerate(theirs.parameters.values()):
        mine = by_name.get(parameter.name)
        if mine is None:
            problems.append(f"has no parameter {parameter.name!r}")
            continue
        positional = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if mine.kind is not parameter.kind:
            problems.append(f"takes {parameter.name!r} as {mine.kind.description}")
        elif positional and our_parameters.index(mine) != position:
            problems.append(f"has {parameter.name!r} in another position")
        if parameter.default is not parameter.empty and not same(mine.default, parameter.default):
            problems.append(f"has another default for {parameter.name!r}: {mine.default!r}")
    for parameter in our_parameters:
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if parameter.name not in theirs.parameters and not optional:
            problems.append(f"requires {parameter.name!r}, which they do not know")
    return problems


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and __init__, wherever in the hierarchy below `object` they are."""
    for name, member in inspect.getmembers(cls):
        inherited = getattr(object, name, None) is member or hasattr(BaseException, name)
        if (name == "__init__" or not name.startswith("_")) and not (
            inherited and name != "__init__"
        ):
            yield name, member


def class_problems(theirs: type, ours: type) -> Iterator[tuple[str, str]]:
    """(member or "", problem) for everything in which `ours` is not what `theirs` is."""
    for base in (Exception, ValueError, RuntimeError, enum.Enum, dict, list):
        if issubclass(theirs, base) and not issubclass(ours, base):
            yield "", f"is not a {base.__name__}"
    if issubclass(ours, Exception) and not issubclass(theirs, Exception):
        yield "", "is an Exception"
    if issubclass(theirs, enum.Enum):
        if {m.name: m.value for m in theirs} != {m.name: m.value for m in ours}:
            yield "", "has other members"
        return
    if dataclasses.is_dataclass(theirs):
        if theirs.__dataclass_params__.frozen != ours.__dataclass_params__.frozen:
            yield "", "is not as frozen"
        if theirs.__dataclass_params__.eq != ours.__dataclass_params__.eq:
            yield "", "compares in another way"
        yield from field_problems(theirs, ours)
    for name, member in own_methods(theirs):
        mine = getattr(ours, name, None)
        if mine is None:
            yield name, "is missing"
        elif callable(member) and signature(member) and not isinstance(member, type):
            for problem in parameter_problems(signature(member), signature(mine)):
                yield ("" if name == "__init__" else name), problem
        elif getattr(member, "__isabstractmethod__", False) < getattr(
            mine, "__isabstractmethod__", False
        ):
            yield name, "must be implemented"


def field_problems(theirs: type, ours: type) -> Iterator[tuple[str, str]]:
    their_fields = [field.name for field in dataclasses.fields(theirs)]
    our_fields = [field.name for field in dataclasses.fields(ours)]
    if our_fields[: len(their_fields)] != their_fields:
        yield "", f"has the fields {our_fields}, not {their_fields}"
    for name in our_fields[len(their_fields) :]:
        yield name, "is a field that they do not have"
    types = {field.name: str(field.type) for field in dataclasses.fields(theirs)}
    for field in dataclasses.fields(ours):
        was_list = types.get(field.name, "").startswith("list[")
        if was_list and not str(field.type).startswith("list["):
            yield field.name, f"is a {field.type}"


def signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def problems_of(module: str, name: str) -> Iterator[tuple[str, str]]:
    """(qualified name, problem) for one public name."""
    theirs, ours = getattr(theirs_of(module), name), getattr(ours_of(module), name, None)
    label = qualified(ours_home(ours) or module, name)
    if ours is None:
        yield label, "is missing"
    elif inspect.isclass(theirs):
        for member, problem in class_problems(theirs, ours):
            yield f"{label}.{member}".rstrip("."), problem
    elif inspect.isfunction(theirs):
        for problem in parameter_problems(inspect.signature(theirs), inspect.signature(ours)):
            yield label, problem


def ours_home(member: Any) -> str:
    """The module under which DCP users know a class that the front door re-exports."""
    if not inspect.isclass(member):
        return ""
    home = getattr(member, "__module__", "").removeprefix("reshard").lstrip(".")
    return home if home in MODULES else ""


def table() -> dict[str, list[str]]:
    """The rows of docs/differences.md: name -> the other cells."""
    rows: dict[str, list[str]] = {}
    for line in DIFFERENCES.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if cells and (match := re.fullmatch(r"`([^`]+)`", cells[0])):
            assert match[1] not in rows, f"{match[1]} has two rows"
            rows[match[1]] = cells[1:]
    return rows


# Tests


@pytest.mark.parametrize(
    ("module", "name"),
    [pytest.param(*pair, id=qualified(*pair)) for pair in PRESENT],
)
def test_every_public_name_takes_the_same_calls_or_has_a_row(module: str, name: str) -> None:
    explained = {*table(), *NOT_YET}
    unexplained = [
        f"{label} {problem}"
        for label, problem in problems_of(module, name)
        if label not in explained
    ]
    assert not unexplained


@pytest.mark.parametrize("name", sorted(set(NOT_YET) - all_modules()))
def test_a_name_that_is_announced_is_still_missing(name: str) -> None:
    first, _, rest = name.partition(".")
    module, path = (first, rest) if rest else ("", first)
    assert has(theirs_of(module), path), "torch does not have it either"
    assert not has(ours_of(module), path), "it is here: compare it"


def has(root: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(root, name):
            return False
        root = getattr(root, name)
    return True


@pytest.mark.parametrize("name", sorted(set(NOT_YET) & all_modules()))
def test_a_module_that_is_announced_is_still_missing(name: str) -> None:
    assert importlib.util.find_spec(f"reshard.{name}") is None, "it is here: compare it"


def test_every_public_module_of_dcp_is_compared_or_announced() -> None:
    public = {name for name in all_modules() if not name.startswith("_")}
    assert public - set(MODULES) - set(NOT_YET) == INTERNAL


def test_every_row_of_the_table_gives_a_reason_and_is_shown_to_be_true() -> None:
    rows = table()
    assert all(len(cells) == 3 and all(cells) for cells in rows.values())
    found = {label for pair in PRESENT for label, _ in problems_of(*pair)}
    assert set(rows) - found - set(DEMONSTRATIONS) == set(), "rows that are no longer true"
    assert set(DEMONSTRATIONS) - set(rows) == set(), "differences without a row"


@pytest.mark.parametrize("row", sorted(DEMONSTRATIONS))
def test_the_two_libraries_differ_as_the_row_says(row: str) -> None:
    ask, their_answer, our_answer = DEMONSTRATIONS[row]
    assert ask(Library(dcp)) == their_answer
    assert ask(Library(reshard)) == our_answer


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (api.MissingKeyError, RuntimeError),
        (api.ShapeMismatchError, ValueError),
        (api.CoverageError, ValueError),
        (api.StateDictError, ValueError),
    ],
)
def test_handlers_written_for_the_errors_of_dcp_still_catch_ours(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert issubclass(ours, reshard.CheckpointException)


def test_everything_public_in_the_package_is_in_all() -> None:
    importable = {
        name
        for name, value in vars(reshard).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert importable == set(reshard.__all__)
    assert len(reshard.__all__) == len(set(reshard.__all__))


@pytest.mark.parametrize(
    "module",
    [name.name for name in pkgutil.walk_packages(reshard.__path__, "reshard.")],
)
def test_everything_in_the_all_of_a_module_can_be_imported(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in getattr(loaded, "__all__", []) if not hasattr(loaded, name)] == []


def test_every_error_of_the_api_is_a_checkpoint_exception() -> None:
    named = [getattr(api, name) for name in api.__all__]
    assert all(issubclass(error, reshard.CheckpointException) for error in named)


def test_the_comparison_notices_each_way_in_which_a_call_could_break() -> None:
    def theirs(a: int, b: int = 1, *, c: int = 2) -> None: ...
    def renamed(a: int, bb: int = 1, *, c: int = 2) -> None: ...
    def moved(b: int = 1, a: int = 0, *, c: int = 2) -> None: ...
    def keyword_only(a: int, *, b: int = 1, c: int = 2) -> None: ...
    def other_default(a: int, b: int = 9, *, c: int = 2) -> None: ...
    def more_required(a: int, b: int = 1, *, c: int = 2, d: int) -> None: ...
    def more_optional(a: int, b: int = 1, d: int = 0, *, c: int = 2) -> None: ...
    def fewer_required(a: int = 0, b: int = 1, *, c: int = 2) -> None: ...

    expected = inspect.signature(theirs)
    for broken in (renamed, moved, keyword_only, other_default, more_required):
        assert parameter_problems(expected, inspect.signature(broken)), broken
    for fine in (theirs, more_optional, fewer_required):
        assert not parameter_problems(expected, inspect.signature(fine)), fine
