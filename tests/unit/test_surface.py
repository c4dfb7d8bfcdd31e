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
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard import api
from support.differences import DEMONSTRATIONS, Library
from support.torch_version import PINNED, TORCH

# Constants and aliases that people import. Functions and classes are all compared, whether torch
# lists them in an __all__ or not.
ALSO_USED = {
    "": [name for name in vars(dcp) if not name.startswith("_")],
    "api": ["WRAPPED_EXCEPTION"],
    "metadata": ["STATE_DICT_TYPE", "STORAGE_TYPES"],
    "default_planner": ["_create_read_items", "_create_write_items", "_flatten_sharded_tensors"],
    "utils": ["CheckpointException"],
    "state_dict_saver": ["Stateful"],
    "state_dict_loader": ["Stateful"],
    "filesystem": [
        *("CURRENT_DCP_VERSION", "DEFAULT_SUFFIX", "_metadata_fn", "narrow_tensor_by_index"),
        *("LoadItemType", "ReadItem", "WriteItem", "WriteItemType", "WriteResult"),
    ],
    "_nested_dict": ["FLATTEN_MAPPING"],
    "_traverse": ["OBJ_PATH", "PATH_ITEM", "STATE_DICT_ITEM", "CONTAINER_TYPE"],
    "_version": ["_derived_version"],
    "logger": ["_dcp_logger", "logger"],
    "logging_handlers": ["DCP_LOGGER_NAME"],
    "optimizer": ["STATE_DICT_2D_LAYOUT"],
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
}
# Name -> the feature that brings it. Shrinks as features land; a stale entry fails.
NOT_YET: dict[str, str] = {}
_INSIDES = "how DCP itself writes and reads; nobody imports it, and nothing here works like that"
_EXCHANGED = "projects only put something else in its place, to change how DCP works; none calls it"
# Name -> why nobody misses it. A search of public code found no project that imports and uses one.
LEFT_OUT = {
    "_experimental": "prototypes; only torch's own tests use them. What became of them is a "
    "package of its own, torch_checkpointing",
    "_async_process_executor._AsyncCheckpointProcess": _INSIDES,
    "_async_process_executor._AsyncCheckpointRequest": _INSIDES,
    "_async_process_executor._CheckpointRequestIdentifier": _INSIDES,
    "_async_process_executor._CheckpointSaveProcessControlOpts": _INSIDES,
    "_async_process_executor._ProcessGroupInitInfo": _INSIDES,
    "_consolidate_hf_safetensors._FqnData": _EXCHANGED,
    "_consolidate_hf_safetensors._InputFileData": _EXCHANGED,
    "_consolidate_hf_safetensors._OutputFileData": _EXCHANGED,
    "_consolidate_hf_safetensors._calculate_max_contiguous_elements": _EXCHANGED,
    "_consolidate_hf_safetensors._parse_input_metadata": _EXCHANGED,
    "_consolidate_hf_safetensors._process_output_file": _EXCHANGED,
    "_consolidate_hf_safetensors._read_tensor_data": _EXCHANGED,
    "_consolidate_hf_safetensors._write_data": _EXCHANGED,
    "_consolidate_hf_safetensors._write_metadata": _EXCHANGED,
    "_consolidate_hf_safetensors._write_overall_metadata_file": _EXCHANGED,
    "_dedup_tensors.init_logger": "sets up a logger of that module alone",
    "_pg_transport._DTensorMeta": _INSIDES,
    "_pg_transport._ShardedTensorMeta": _INSIDES,
    "_pg_transport._StateDictMeta": _INSIDES,
    "_pg_transport._TensorMeta": _INSIDES,
    "_pg_transport._cast_tensor": _INSIDES,
    "_pg_transport._prepare_state_dict": _INSIDES,
    "_pg_transport._prepare_tensor": _INSIDES,
    "_pg_transport._timeit": _INSIDES,
    "_traverse._print_nested": "the inner half of print_tensor",
    "_traverse.traverse_state_dict_v_2_3": "the rules of torch 2.3, which a load applies by itself",
    "_state_dict_stager.StateDictStager.deepcopy_with_tensor_offload": _INSIDES,
    "filesystem._FileSystemWriter": "the half of FileSystemWriter that does not stage",
    "filesystem._OverlappingCpuLoader": _INSIDES,
    "filesystem._SerialCpuLoader": _INSIDES,
    "filesystem._TensorLoader": _INSIDES,
    "filesystem._generate_uuid": "str(uuid.uuid4())",
    "filesystem._write_files_from_queue": _INSIDES,
    "optimizer._create_colwise_spec": "for ShardedTensors that load_sharded_optimizer_state_dict "
    "does not make",
    "optimizer._gen_rank_device": "as above",
    "optimizer._is_nested_tensor": "as above",
    "planner_helpers._iterate_state_dict": "one of several walks through a state dict; here there "
    "is one, without recursion",
}
# What newer torch has, in case an older one is installed: (module, name).
NEWER = [
    ("", "CheckpointableTensor"),
    ("", "FsspecReader"),
    ("", "FsspecWriter"),
    ("fsspec_filesystem", "FsspecReader"),
    ("fsspec_filesystem", "FsspecWriter"),
    ("metadata", "Metadata.version"),
    ("metadata", "TensorProperties.strides"),
    ("planner_helpers", "_get_checkpointable_tensor_write_items"),
    ("protocol", "CheckpointableTensor"),
    ("protocol", "_copy_checkpointable_tensor_metadata"),
    ("protocol", "_get_checkpointable_tensor_chunks"),
    ("protocol", "_get_checkpointable_tensor_shard"),
    ("protocol", "_is_checkpointable_tensor"),
    ("protocol", "_validate_checkpointable_tensor_metadata"),
]
# What older torch has, or takes, and newer torch does not any more: the newer way is followed.
OLDER = {
    "_async_executor._AsyncCheckpointExecutor.execute_save",
    "_async_process_executor._ProcessBasedAsyncCheckpointExecutor.execute_save",
    "_async_thread_executor._ThreadBasedAsyncCheckpointExecutor.execute_save",
    "_consolidate_hf_safetensors._read_tensor_data_mmap",
    "_hf_utils._HFStorageInfo",
    "filesystem.FileSystemWriter.metadata_path",
    "hf_storage.HuggingFaceStorageReader",
}
DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"


def all_modules() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(dcp.__path__)}


def theirs_of(module: str) -> Any:
    return importlib.import_module(f"torch.distributed.checkpoint.{module}".rstrip("."))


def ours_of(module: str) -> Any:
    return importlib.import_module(f"reshard.{module}".rstrip("."))


def names_to_compare(module: str) -> list[str]:
    """What a module lists, what it defines, and what people import from it besides."""
    theirs = theirs_of(module)
    defined = [
        name
        for name, value in vars(theirs).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == theirs.__name__
    ]
    # All of `state_dict` is torch's own, handed on.
    defined = [] if module == "state_dict" else defined
    names = [*getattr(theirs, "__all__", []), *ALSO_USED.get(module, []), *defined]
    here = [name for name in dict.fromkeys(names) if hasattr(theirs, name)]
    return [name for name in here if not inspect.ismodule(getattr(theirs, name))]


def qualified(module: str, name: str) -> str:
    return f"{module}.{name}".lstrip(".")


MODULES = ["", *sorted(all_modules() - NOT_YET.keys() - LEFT_OUT.keys())]
ALL_NAMES = [(module, name) for module in MODULES for name in names_to_compare(module)]
PRESENT = [pair for pair in ALL_NAMES if qualified(*pair) not in {*NOT_YET, *LEFT_OUT}]
NEWER_NAMES = {qualified(*pair) for pair in NEWER}
NEWER_MODULES = {"fsspec_filesystem", "protocol"}


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
        if parameter.name == "self":
            continue
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
    if not hasattr(ours_of(module), name):
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
    explained = {*table(), *NOT_YET, *LEFT_OUT, *NEWER_NAMES, *(OLDER if TORCH < PINNED else ())}
    unexplained = [
        f"{label} {problem}"
        for label, problem in problems_of(module, name)
        if label not in explained
    ]
    assert not unexplained


@pytest.mark.parametrize("module", MODULES)
def test_no_module_hands_on_what_is_replaced_here(module: str) -> None:
    theirs, ours = theirs_of(module), ours_of(module)
    handed_on = {
        name: value
        for name, value in vars(theirs).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and getattr(ours, name, None) is value
    }
    for name, value in handed_on.items():
        home = value.__module__.removeprefix(dcp.__name__).lstrip(".")
        if home in MODULES:
            assert getattr(ours_of(home), name, value) is value, f"{name} is torch's"


@pytest.mark.parametrize("name", sorted({*NOT_YET, *LEFT_OUT}))
def test_a_name_that_is_announced_or_left_out_is_still_missing(name: str) -> None:
    first, _, rest = name.partition(".")
    if name in all_modules() | NEWER_MODULES:
        assert importlib.util.find_spec(f"reshard.{name}") is None, "it is here: compare it"
        return
    module, path = (first, rest) if rest else ("", first)
    if name not in NEWER_NAMES and not torch_has(module, path):
        skip_if_older(f"has no {name} either")
        pytest.fail("torch does not have it either")
    assert not has(ours_of(module), path), "it is here: compare it"


def torch_has(module: str, path: str) -> bool:
    in_torch = module in {"", *all_modules()}
    return in_torch and has(theirs_of(module), path)


def skip_if_older(what: str) -> None:
    if TORCH < PINNED:
        pytest.skip(f"torch {torch.__version__} {what}")


def has(root: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(root, name):
            return False
        root = getattr(root, name)
    return True


@pytest.mark.parametrize(("module", "name"), NEWER, ids=lambda each: each)
def test_what_newer_torch_has_is_here_as_well(module: str, name: str) -> None:
    if not {qualified(module, name), module} & NOT_YET.keys():
        assert has(ours_of(module), name)


def test_every_row_of_the_table_gives_a_reason_and_is_shown_to_be_true() -> None:
    rows = table()
    assert all(len(cells) == 3 and all(cells) for cells in rows.values())
    found = {label for pair in PRESENT for label, _ in problems_of(*pair)}
    assert set(rows) - found - set(DEMONSTRATIONS) == set(), "rows that are no longer true"
    assert set(DEMONSTRATIONS) - set(rows) == set(), "differences without a row"


@pytest.mark.parametrize("row", sorted(DEMONSTRATIONS))
def test_the_two_libraries_differ_as_the_row_says(row: str) -> None:
    ask, their_answer, our_answer = DEMONSTRATIONS[row]
    if not torch_has(*row.split(".")[:2]) or f"{row}.execute_save" in OLDER:
        skip_if_older(f"has no such {row}")
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
