"""What a new user reads when something is wrong, alone in one process."""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import pickle
import shutil
import traceback
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import (
    CheckpointException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingKeyError,
    PlanError,
    ShapeMismatchError,
    UnsafeValueError,
    _wrap_exception,
)
from reshard.checkpoint.to_metadata import StorageMap
from reshard.coordination.error_wire import decode_error, encode_error
from reshard.coordination.failures import join_failures, say_again
from reshard.metadata import TensorStorageMetadata
from reshard.plans.entries import ChunkList
from support.errors import handled_here
from support.failing_system import refusing


def model() -> dict[str, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).state_dict()


def prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def refusal(kind: type[CheckpointException], folder: Path, state: Any, **options: Any) -> list[str]:
    """The lines of the error of exactly that class with which a load fails."""
    with pytest.raises(kind) as raised:
        reshard.load(state, checkpoint_id=folder, **options)
    assert type(raised.value) is kind
    assert isinstance(raised.value, CheckpointException)
    [(rank, (reason, stack))] = raised.value.failures.items()
    assert rank == 0
    assert type(reason) is kind
    assert stack[-1].filename.startswith(os.path.dirname(reshard.__file__))
    assert raised.value.__cause__ is None
    shown = None if raised.value.__suppress_context__ else raised.value.__context__
    assert shown in (None, handled_here()), "another error is printed first"
    printed = "".join(traceback.format_exception(raised.value, chain=False))
    assert printed.count("reshard/") == 1, "frames of ours are shown"
    return str(raised.value).split("\n")


# Keys


def test_a_wrong_key_is_named_with_those_that_come_close(tmp_path: Path) -> None:
    reshard.save({"layer.weight": torch.ones(2), "epoch": 1}, checkpoint_id=tmp_path)

    assert refusal(MissingKeyError, tmp_path, {"layer.wieght": torch.ones(2), "epoch": 0}) == [
        "Missing key in checkpoint state_dict: layer.wieght.",
        "The checkpoint has 'layer.weight'.",
        "Load with strict=False (or a planner with allow_partial_load=True) to leave missing keys "
        "as they are.",
    ]


PREFIXES = [
    ("", "_orig_mod.", "lack the prefix '_orig_mod.'", {"": "_orig_mod"}),
    ("_orig_mod.", "", "have the prefix '_orig_mod.'", {"_orig_mod": ""}),
    ("module.", "", "have the prefix 'module.'", {"module": ""}),
    ("", "model.net.", "lack the prefix 'model.net.'", {"": "model.net"}),
    ("model.", "net.", "begin with 'model.' in place of 'net.'", {"model": "net"}),
]


@pytest.mark.parametrize(("theirs", "ours", "difference", "rename"), PREFIXES)
def test_a_checkpoint_that_differs_by_a_prefix_says_how_to_rename(
    theirs: str, ours: str, difference: str, rename: dict[str, str], tmp_path: Path
) -> None:
    saved = model()
    reshard.save(prefixed(theirs, saved), checkpoint_id=tmp_path)
    wanted = prefixed(ours, {name: torch.zeros_like(value) for name, value in saved.items()})

    assert refusal(MissingKeyError, tmp_path, wanted) == [
        f"None of the 4 keys match: those of the checkpoint {difference}.",
        f"Pass rename={rename}.",
    ]
    reshard.load(wanted, checkpoint_id=tmp_path, rename=rename)
    assert all(torch.equal(wanted[f"{ours}{name}"], value) for name, value in saved.items())


def test_the_advice_to_rename_keeps_keys_that_match(tmp_path: Path) -> None:
    reshard.save({**model(), "step": 7}, checkpoint_id=tmp_path)
    wanted: dict[str, Any] = {"model": model(), "step": 0}

    first, difference, advice = refusal(MissingKeyError, tmp_path, wanted)

    assert first == (
        "Missing key in checkpoint state_dict: model.0.weight. 3 more keys are missing, such as "
        "'model.0.bias', 'model.1.weight', 'model.1.bias'."
    )
    assert difference == "Those of the checkpoint lack the prefix 'model.'."
    assert advice == "Pass rename={'': 'model', 'step': 'step'}."
    reshard.load(wanted, checkpoint_id=tmp_path, rename={"": "model", "step": "step"})
    assert wanted["step"] == 7


def wrapped_below(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{name[0]}._orig_mod.{name[2:]}": value for name, value in state.items()}


def test_names_of_wrapped_submodules_are_taken_away_by_a_function(tmp_path: Path) -> None:
    saved, wanted = model(), model()
    reshard.save(wrapped_below(saved), checkpoint_id=tmp_path)

    assert refusal(MissingKeyError, tmp_path, wanted) == [
        "None of the 4 keys match: those of the checkpoint have '_orig_mod.' in them.",
        "Pass rename=lambda name: name.replace('_orig_mod.', '').",
    ]
    reshard.load(wanted, checkpoint_id=tmp_path, rename=lambda name: name.replace("_orig_mod.", ""))
    assert all(torch.equal(wanted[name], value) for name, value in saved.items())


def test_a_wrapped_module_is_told_to_load_into_the_module_itself(tmp_path: Path) -> None:
    reshard.save(model(), checkpoint_id=tmp_path)

    first, advice = refusal(MissingKeyError, tmp_path, wrapped_below(model()))

    assert first == "None of the 4 keys match: those of the checkpoint lack '_orig_mod.'."
    assert advice.startswith("Load into the state dict of the module that is not wrapped")


def test_the_checkpoint_of_another_model_shows_what_it_has(tmp_path: Path) -> None:
    reshard.save({f"encoder.{n}": torch.ones(1) for n in range(9)}, checkpoint_id=tmp_path)
    wanted = {f"decoder.block{n}.w": torch.ones(1) for n in range(120)}

    assert refusal(MissingKeyError, tmp_path, wanted)[:3] == [
        "None of the 120 keys match.",
        "Missing key in checkpoint state_dict: decoder.block0.w. 119 more keys are missing, such "
        "as 'decoder.block1.w', 'decoder.block2.w', 'decoder.block3.w', 'decoder.block4.w', "
        "'decoder.block5.w'.",
        "The checkpoint has 'encoder.0', 'encoder.1', 'encoder.2', 'encoder.3', 'encoder.4', ....",
    ]


@pytest.mark.parametrize("value", [1, {"seed": 1}])
def test_a_missing_key_that_is_stored_per_rank_says_how_to_ask_for_it(
    value: Any, tmp_path: Path
) -> None:
    reshard.save({"rng": reshard.per_rank(value)}, checkpoint_id=tmp_path)
    name = "rng.seed" if isinstance(value, dict) else "rng"
    wanted: dict[str, Any] = {"rng": {"seed": 0} if isinstance(value, dict) else 0}

    assert refusal(MissingKeyError, tmp_path, wanted) == [
        f"Missing key in checkpoint state_dict: {name}.",
        f"The checkpoint holds {name!r} as a per-rank value, saved by 1 rank.",
        "Put reshard.per_rank(...) around the value in the state dict.",
    ]
    wanted["rng"] = reshard.per_rank(wanted["rng"])
    reshard.load(wanted, checkpoint_id=tmp_path)
    assert wanted["rng"] == value


def test_a_per_rank_value_that_is_not_one_says_so(tmp_path: Path) -> None:
    reshard.save({"rng": 1}, checkpoint_id=tmp_path)

    assert refusal(CheckpointException, tmp_path, {"rng": reshard.per_rank(0)}) == [
        "'rng' is not stored as a per-rank value. Load it without per_rank(...)"
    ]
    assert refusal(MissingKeyError, tmp_path, {"r": reshard.per_rank(0)}) == [
        "Missing key in checkpoint state_dict: r. Mark it with per_rank(..., on_resize='drop') to "
        "leave it as it is"
    ]


# Shapes


def test_a_wrong_shape_names_both_and_can_be_left_out(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(4, 2), "v": torch.ones(3)}, checkpoint_id=tmp_path)
    wanted = {"w": torch.zeros(2, 4), "v": torch.zeros(3)}

    assert refusal(ShapeMismatchError, tmp_path, wanted) == [
        "Size mismatch between saved (4, 2) and current: (2, 4) for 'w'.",
        "One looks like the transpose of the other.",
        "Build the model with the shape that was saved, or pass exclude=['w'] to leave it as it "
        "is.",
    ]
    reshard.load(wanted, checkpoint_id=tmp_path, exclude=["w"])
    assert (wanted["w"].sum(), wanted["v"].sum()) == (0, 3)


def test_all_wrong_shapes_are_named_at_once(tmp_path: Path) -> None:
    reshard.save({name: torch.ones(4) for name in "abc"}, checkpoint_id=tmp_path)
    wanted = {"a": torch.zeros(1), "b": torch.zeros(4), "c": torch.zeros(2)}

    assert refusal(ShapeMismatchError, tmp_path, wanted) == [
        "Size mismatch between saved (4,) and current: (1,) for 'a'.",
        "1 more do not fit: 'c'.",
        "Build the model with the shape that was saved, or pass exclude=['a', 'c'] to leave these "
        "as they are.",
    ]


def test_a_value_in_the_place_of_a_tensor_is_named(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)

    assert refusal(ShapeMismatchError, tmp_path, {"w": 0.5}) == [
        "'w' is stored as a tensor of shape (4,), but the state dict has a float in its place.",
        "Put a tensor of that shape there.",
    ]


# Places


def test_a_place_where_nothing_is_says_so(tmp_path: Path) -> None:
    assert refusal(CheckpointNotFoundError, tmp_path / "step-7", {"w": 0}) == [
        f"there is no checkpoint at {tmp_path}/step-7: nothing is there. Check the path"
    ]


def test_a_directory_of_checkpoints_says_what_is_in_it(tmp_path: Path) -> None:
    for step in range(4):
        reshard.save({"w": 1}, checkpoint_id=tmp_path / f"step-{step}")

    assert refusal(CheckpointNotFoundError, tmp_path, {"w": 0}) == [
        f"there is no checkpoint at {tmp_path}: it has no .metadata, only 'step-0', 'step-1', "
        "'step-2', .... If the checkpoint is one of these, pass its path"
    ]


def test_a_half_written_checkpoint_says_that_it_was_never_committed(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").unlink()

    assert refusal(CheckpointNotFoundError, tmp_path, {"w": torch.ones(2)}) == [
        f"the checkpoint at {tmp_path} was never committed: it has shard files but no .metadata. "
        "A save that was cut off leaves these; use an older checkpoint"
    ]


def test_a_damaged_checkpoint_names_the_key_and_the_file(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    (line,) = refusal(CorruptCheckpointError, tmp_path, {"w": torch.ones(2)})
    assert line.startswith(
        f"the stored bytes of 'w' in {file.name!r} of {tmp_path} are damaged: their checksum is "
    )


def test_a_file_of_an_older_torch_save_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "model.pt", _use_new_zipfile_serialization=False)

    assert refusal(CheckpointNotFoundError, tmp_path / "model.pt", model()) == [
        f"{tmp_path}/model.pt is not a checkpoint: neither a directory, nor a file of safetensors "
        "or of torch.save since torch 1.6. Read it with what wrote it"
    ]


def test_a_pickle_in_the_place_of_the_manifest_says_what_it_should_be(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"w": 1}))

    assert refusal(CorruptCheckpointError, tmp_path, {"w": 0}) == [
        f".metadata of {tmp_path} is not metadata of torch.distributed.checkpoint: it has a dict "
        "in place of Metadata. Load another checkpoint"
    ]


def test_a_value_that_is_stored_as_a_pickle_says_how_to_load_it(tmp_path: Path) -> None:
    reshard.save({"price": Decimal(3)}, checkpoint_id=tmp_path)
    wanted = {"price": None}

    assert refusal(UnsafeValueError, tmp_path, wanted) == [
        "'price' is stored as a pickled object of type decimal.Decimal, which could run code when "
        "it is read. Pass allow_pickle=True to load it, if you trust where the checkpoint comes "
        "from"
    ]
    reshard.load(wanted, checkpoint_id=tmp_path, allow_pickle=True)
    assert wanted["price"] == Decimal(3)


@pytest.mark.parametrize("act", [reshard.save, reshard.load])
def test_a_url_says_which_storages_there_are(act: Any) -> None:
    with pytest.raises(RuntimeError) as raised:
        act({"w": 1}, checkpoint_id="carrier-pigeon://bucket/step-7")

    argument = "storage_writer" if act is reshard.save else "storage_reader"
    assert str(raised.value) == (
        "'carrier-pigeon://bucket/step-7' is a URL of a kind that reshard does not know. It knows "
        "s3, gs, az and those of fsspec. Pass one of these or a directory, or your own storage "
        f"with {argument}=..."
    )


# Errors that are not ours


class FullDisk(reshard.FileSystemWriter):
    def open_store(self) -> Any:
        store = super().open_store()
        store._system = refusing(errno.ENOSPC, name="pwritev")
        return store


def test_a_full_disk_begins_with_that(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as raised:
        reshard.save({"w": torch.ones(2)}, storage_writer=FullDisk(tmp_path))

    error = raised.value
    assert isinstance(error.__cause__, OSError)
    assert str(error) == (
        f"No space left on device: {error.__cause__.filename!r}. Free some space, or save "
        "somewhere else."
    )
    assert error.failures[0][0] is error.__cause__
    assert len(error.failures[0][1]) > 3, "the stack is not complete"
    printed = "".join(traceback.format_exception(error))
    assert printed.startswith("OSError: [Errno 28] No space left on device")
    assert printed.count("reshard/operations") == 1


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("optimizer")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def test_an_error_of_a_stateful_is_shown_with_its_stack_and_without_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as raised:
        reshard.save({"trainer": Broken()}, checkpoint_id=tmp_path)

    error = raised.value
    assert str(error) == "KeyError: 'optimizer' (while asking 'trainer' for its state)"
    assert type(error.failures[0][0]) is KeyError
    printed = "".join(traceback.format_exception(error))
    assert printed.count("raise KeyError") == 1
    cause, _, raised_here = printed.partition("\nThe above exception was the direct cause of")
    assert "reshard/" not in cause
    assert raised_here.count("reshard/") == 1
    again = say_again(error, str(error))
    assert str(again).split("\n")[2] == "Stack of rank 0 (most recent call last):"
    assert str(again).count("File ") == 1


def test_a_bug_of_ours_is_shown_with_all_of_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.plans.local_save_plan.is_plain", None)
    with pytest.raises(CheckpointException) as raised:
        reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)

    assert str(raised.value) == "TypeError: 'NoneType' object is not callable"
    printed = "".join(traceback.format_exception(raised.value))
    assert "in _add_value" in printed.partition("\nThe above exception")[0]


def test_what_we_refuse_with_a_class_of_python_is_printed_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as raised:
        reshard.save(torch.nn.Linear(1, 1), checkpoint_id=tmp_path)  # type: ignore[arg-type]

    assert str(raised.value) == (
        "a state dict is a dict, not a Linear: save {'model': model} in place of model"
    )
    assert type(raised.value.failures[0][0]) is TypeError
    assert "".join(traceback.format_exception(raised.value)).count("a state dict is a dict") == 1


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


class Odd(Exception):
    errno: Any = [1]  # noqa: RUF012
    __notes__ = 7


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(2, "No such file or directory", 7), "No such file or directory: '7'"),
        (Frozen(), "Frozen"),
        (Odd("what"), "Odd: what"),
    ],
)
def test_an_odd_error_is_still_told(error: Exception, text: str, tmp_path: Path) -> None:
    class Raising(reshard.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            raise error

    with pytest.raises(CheckpointException) as raised:
        reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=Raising())
    assert str(raised.value).startswith(text)
    assert raised.value.failures[0][0] is error


def test_an_error_whose_pickle_is_no_error_is_sent_as_text() -> None:
    class Pretending(Exception):
        def __reduce__(self) -> Any:
            return int, (3,)

    sent, _ = decode_error(encode_error(Pretending("reason")))
    assert "reason" in str(sent)


def test_errors_about_different_files_are_told_apart() -> None:
    missing = [FileNotFoundError(2, "No such file", name) for name in ("a", "b")]
    text = str(join_failures(failed(*missing), "write"))
    assert "'a'" in text
    assert "'b'" in text


def test_an_error_keeps_its_arguments_when_it_is_copied() -> None:
    error = CheckpointNotFoundError("nothing there")
    assert repr(copy.deepcopy(error)) == repr(error)


# Several ranks


def failed(*errors: Exception | None) -> dict[int, Any]:
    """What failed on which rank."""
    told = {}
    for rank, error in enumerate(errors):
        if isinstance(error, CheckpointException):
            # Not raised here, which would make it one that code of users raises.
            told[rank] = _wrap_exception(error)
            continue
        try:
            if error is not None:
                raise error
        except Exception as caught:  # noqa: BLE001 - told
            told[rank] = _wrap_exception(caught)
    return told


def test_one_reason_on_many_ranks_is_said_once() -> None:
    errors = [None if rank in (1, 3, 4) else MissingKeyError("no such key") for rank in range(9)]
    error = join_failures(failed(*errors), "plan")

    assert type(error) is MissingKeyError
    assert str(error) == "no such key\nOn ranks 0, 2 and 5-8, while planning."
    assert sorted(error.failures) == [0, 2, 5, 6, 7, 8]


def test_a_full_disk_is_one_reason_whatever_the_files_are_called() -> None:
    errors = [OSError(errno.ENOSPC, "No space left on device", f"file{n}") for n in range(64)]

    assert str(join_failures(failed(*errors), "write")).startswith(
        "No space left on device: 'file0'. Free some space, or save somewhere else.\n"
        "On ranks 0-63, while writing."
    )


def test_different_reasons_are_told_apart() -> None:
    error = join_failures(
        failed(MissingKeyError("no key"), PlanError("no plan"), MissingKeyError("no key")), "plan"
    )

    assert type(error) is CheckpointException
    assert str(error) == (
        "no key\nOn ranks 0 and 2, while planning.\n\nno plan\nOn rank 1, while planning."
    )


def test_only_the_first_of_very_many_reasons_are_told() -> None:
    error = join_failures(failed(*(MissingKeyError(f"no key {n}") for n in range(64))), "plan")

    assert type(error) is MissingKeyError
    assert str(error).count("\n\n") == 5
    assert str(error).endswith(
        "For 59 other reasons on ranks 5-63: see the failures of this exception."
    )


class Demanding(MissingKeyError):
    """A subclass of a user, with a constructor of its own."""

    def __init__(self, key: str, *, owner: str) -> None:
        super().__init__(f"{owner} wants {key}")
        self.key = key


def test_a_subclass_with_another_constructor_survives_every_way() -> None:
    told = failed(Demanding("w", owner="me"), Demanding("w", owner="me"))
    told = {rank: decode_error(encode_error(*each)) for rank, each in told.items()}

    joined = join_failures(told, "plan")
    for error in (
        joined,
        decode_error(encode_error(joined))[0],
        pickle.loads(pickle.dumps(joined)),
    ):
        assert type(error) is Demanding
        assert error.key == "w"
        assert str(error) == "me wants w\nOn ranks 0-1, while planning."
        assert sorted(error.failures) == [0, 1]
        assert type(error.failures[1][0]) is Demanding


def test_a_subclass_that_the_receiver_lacks_arrives_as_the_class_it_derives_from() -> None:
    class OfThisTest(Demanding):
        pass

    error, _ = decode_error(encode_error(OfThisTest("w", owner="me")))

    assert type(error) is MissingKeyError
    assert str(error) == "me wants w"


def test_the_reason_is_found_at_the_end_of_the_failures(tmp_path: Path) -> None:
    reshard.save({"w": 1}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeyError) as raised:
        reshard.load({"v": 1}, checkpoint_id=tmp_path)

    reason = raised.value.failures[0][0]
    assert str(reason) == str(raised.value)
    assert isinstance(reason, CheckpointException)
    assert reason.failures == {}


# What is printed of metadata


FIRST_CHUNK = [reshard.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((10, 10)))]


def test_metadata_is_printed_in_one_line_at_any_size(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    state = {f"w{n}": torch.ones(10, 10) for n in range(1000)}
    reshard.save({**state, "step": 1}, checkpoint_id=tmp_path)
    metadata = reshard.FileSystemReader(tmp_path).read_metadata()

    assert repr(metadata) == (
        "<Metadata: 1000 tensors of 400,000 bytes, 1 values: 'w0', 'w1', 'w2', ...>"
    )
    assert isinstance(metadata.storage_data, StorageMap)
    assert repr(metadata.storage_data) == "<StorageMap of 1000 chunks and 1 values in 1 files>"
    entry = metadata.state_dict_metadata["w0"]
    assert isinstance(entry, TensorStorageMetadata)
    assert repr(entry.chunks) == repr(FIRST_CHUNK)
    assert isinstance(entry.chunks, ChunkList)
    assert entry.chunks.untouched


def test_odd_metadata_can_be_printed() -> None:
    entry = TensorStorageMetadata(reshard.metadata.TensorProperties(), (2, 3), [])  # type: ignore
    assert repr(reshard.Metadata({"w": entry})).startswith("<Metadata: 1 tensors of 24 bytes")
    assert repr(reshard.Metadata(None)) == repr(reshard.Metadata({}))  # type: ignore[arg-type]


def test_metadata_of_nothing_can_be_printed() -> None:
    assert repr(reshard.Metadata({})) == "<Metadata: 0 tensors of 0 bytes, 0 values>"
