"""Tensors that a background save does not copy, because its base holds them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import BaseError, CheckpointException
from reshard.background import unchanged
from reshard.background.queue import save_queue
from reshard.background.unchanged import find_unchanged
from reshard.checkpoint import bases
from reshard.metadata import Metadata
from reshard.operations.save import SaveSettings
from reshard.staging import BlockingAsyncStager
from reshard.state_dict_saver import AsyncCheckpointerType

KINDS = list(AsyncCheckpointerType)
LARGE = 100_000
"""Elements of a tensor that is much longer than the bytes that are looked at first."""


class Holder:
    """A value that hides a tensor from whoever looks through containers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.fixture(autouse=True)
def _no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have found out about names and files does not count."""
    monkeypatch.setattr(unchanged._not_frozen, "_made", [])
    monkeypatch.setattr(bases._hashes, "_made", [])


@contextmanager
def busy_background() -> Iterator[None]:
    """No background save begins within the block."""
    gate = threading.Event()
    future = save_queue().submit(None, lambda: gate.wait(60) and Metadata({}))
    try:
        yield
    finally:
        gate.set()
        future.result()


def state() -> dict[str, Any]:
    return {"w": torch.arange(LARGE, dtype=torch.float32), "step": 1}


def kept(state_dict: dict[str, Any], target: Path, base: Path, **options: Any) -> set[str]:
    """The names of what is not copied."""
    settings = SaveSettings(base=base, **options)
    found = find_unchanged(state_dict, str(target), settings, None)
    return {each.content.name for each in found.kept}


def async_save(state_dict: dict[str, Any], folder: Path, **options: Any) -> Any:
    return reshard.async_save(state_dict, checkpoint_id=folder, **options)


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Any]:
    """A state that the checkpoint `second` refers to."""
    tensors = state()
    reshard.save(tensors, checkpoint_id=tmp_path / "first")
    async_save(tensors, tmp_path / "second", base=tmp_path / "first").result()
    return tensors


def own_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


# What the base is found to hold at the call


def test_a_tensor_that_the_base_holds_is_not_copied(known: dict[str, Any], tmp_path: Path) -> None:
    assert kept(known, tmp_path / "third", tmp_path / "second") == {"w"}


def through_its_counter(tensors: dict[str, Any]) -> None:
    tensors["w"][-1] += 1


def behind_its_counter(tensors: dict[str, Any]) -> None:
    tensors["w"].data[-1] = -1


def through_an_array(tensors: dict[str, Any]) -> None:
    tensors["w"].numpy()[-1] = -1


def in_the_first_bytes(tensors: dict[str, Any]) -> None:
    tensors["w"].data[0] = -1


def as_another_tensor(tensors: dict[str, Any]) -> None:
    tensors["w"] = tensors["w"] + 1


CHANGES = [
    through_its_counter,
    behind_its_counter,
    through_an_array,
    in_the_first_bytes,
    as_another_tensor,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_was_changed_is_copied(
    change: Callable[[dict[str, Any]], None], known: dict[str, Any], tmp_path: Path
) -> None:
    change(known)
    assert kept(known, tmp_path / "third", tmp_path / "second") == set()

    async_save(known, tmp_path / "third", base=tmp_path / "second").result()

    assert torch.equal(reshard.read_state_dict(tmp_path / "third")["w"], known["w"])


@pytest.mark.parametrize("before", CHANGES)
def test_changes_on_both_sides_of_the_call_are_told_apart(
    before: Callable[[dict[str, Any]], None], known: dict[str, Any], tmp_path: Path
) -> None:
    before(known)
    wanted = known["w"].clone()
    with busy_background():
        future = async_save(known, tmp_path / "third", base=tmp_path / "second")
        known["w"].add_(1)
    future.result()

    assert torch.equal(reshard.read_state_dict(tmp_path / "third")["w"], wanted)


def test_parameters_named_by_their_data_may_be_trained_after_the_call(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(LARGE, dtype=torch.float32))
    wanted = weight.detach().clone()
    reshard.save({"w": weight.data}, checkpoint_id=tmp_path / "0")
    async_save({"w": weight.data}, tmp_path / "1", base=tmp_path / "0").result()
    with busy_background():
        future = async_save({"w": weight.data}, tmp_path / "2", base=tmp_path / "1")
        with torch.no_grad():
            weight.add_(1)
    future.result()

    assert torch.equal(reshard.read_state_dict(tmp_path / "2")["w"], wanted)


def test_tensors_without_counters_are_compared_like_others(tmp_path: Path) -> None:
    with torch.inference_mode():
        weight = torch.zeros(LARGE)
    reshard.save({"w": weight}, checkpoint_id=tmp_path / "0")
    async_save({"w": weight}, tmp_path / "1", base=tmp_path / "0").result()
    with torch.inference_mode():
        weight[-1] = 1

    async_save({"w": weight}, tmp_path / "2", base=tmp_path / "1").result()

    assert reshard.read_state_dict(tmp_path / "2")["w"][-1] == 1


def test_a_tensor_that_is_trained_is_copied(known: dict[str, Any], tmp_path: Path) -> None:
    known["w"].requires_grad_()

    assert kept(known, tmp_path / "third", tmp_path / "second") == set()


def test_many_tensors_are_compared_each_with_its_own(tmp_path: Path) -> None:
    tensors = {str(number): torch.full((LARGE // 50,), float(number)) for number in range(50)}
    reshard.save(tensors, checkpoint_id=tmp_path / "a")
    for number in range(0, 50, 3):
        tensors[str(number)][-1] = -1

    left = {str(number) for number in range(50) if number % 3}
    assert kept(tensors, tmp_path / "b", tmp_path / "a") == left


# What the user says is unchanged


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["base.*"], {"base.w", "base.b"}),
        ("base.w", {"base.w"}),
        (["*.b"], {"base.b", "head.b"}),
        (["nothing"], set()),
        (["BASE.*"], set()),
    ],
)
def test_frozen_patterns_name_what_is_not_copied(
    patterns: Any, expected: set[str], tmp_path: Path
) -> None:
    names = {"base": {"w": 9, "b": 3}, "head": {"b": 2}}
    tensors = {
        part: {name: torch.ones(size, requires_grad=True) for name, size in of_part.items()}
        for part, of_part in names.items()
    }
    reshard.save(tensors, checkpoint_id=tmp_path / "a")

    assert kept(tensors, tmp_path / "b", tmp_path / "a", frozen=patterns) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_tensors_that_the_base_does_not_hold_are_copied(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    reshard.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a")
    tensors = {"w": torch.ones(5), "new": torch.ones(3), "half": torch.ones(2).half()}

    async_save(
        tensors,
        tmp_path / "b",
        base=tmp_path / "a",
        frozen=["*"],
        async_checkpointer_type=kind,
    ).result()

    found = reshard.read_state_dict(tmp_path / "b")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [["w"], ["tied"], ["*"], ["w", "nested.*"]])
def test_a_tensor_that_is_frozen_under_some_of_its_names_is_saved_under_all(
    frozen: list[str], kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    weight = torch.arange(LARGE, dtype=torch.float32)
    reshard.save({"w": weight, "tied": weight}, checkpoint_id=tmp_path / "a")
    tensors = {
        "a": weight,
        "w": weight,
        "tied": weight.detach(),
        "nested": {"front": weight[:7], "all": weight},
    }

    async_save(
        tensors, tmp_path / "b", base=tmp_path / "a", frozen=frozen, async_checkpointer_type=kind
    ).result()

    found = reshard.read_state_dict(tmp_path / "b")
    for name in ("a", "w", "tied"):
        assert torch.equal(found[name], weight), name
    assert torch.equal(found["nested"]["front"], weight[:7])
    assert torch.equal(found["nested"]["all"], weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tensor_within_a_value_is_saved_with_the_value(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    weight = torch.arange(LARGE, dtype=torch.float32)
    reshard.save({"w": weight}, checkpoint_id=tmp_path / "a")
    tensors = {"w": weight, "hidden": Holder(weight)}
    options = {"base": tmp_path / "a", "frozen": ["w"], "async_checkpointer_type": kind}

    async_save(tensors, tmp_path / "b", **options).result()

    found = reshard.read_state_dict(tmp_path / "b", allow_pickle=True)
    assert torch.equal(found["w"], weight)
    assert torch.equal(found["hidden"].tensor, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_tensors_that_have_changed_fail_one_save_that_names_all_of_them(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    tensors = {name: torch.zeros(LARGE) for name in ("a", "b", "c")}
    reshard.save(tensors, checkpoint_id=tmp_path / "first")
    tensors["a"].data[-1] = tensors["c"].data[-1] = 1
    options = {"base": tmp_path / "first", "frozen": "*", "async_checkpointer_type": kind}

    with pytest.raises(BaseError, match=r"the bytes of 'a', 'c', which were not copied"):
        async_save(tensors, tmp_path / "second", **options).result()
    assert not (tmp_path / "second").exists()

    async_save(tensors, tmp_path / "second", **options).result()
    found = reshard.read_state_dict(tmp_path / "second")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_frozen_tensor_that_is_changed_after_the_call_fails_the_save(
    known: dict[str, Any], tmp_path: Path
) -> None:
    with busy_background():
        future = async_save(known, tmp_path / "third", base=tmp_path / "second", frozen=["w"])
        known["w"].zero_()

    with pytest.raises(BaseError, match=r"'w', which were not copied.*while this save was waiting"):
        future.result()
    assert not (tmp_path / "third").exists()


def hugging_face_directory(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_plain_files_are_not_read_through_before_the_call_returns(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(LARGE, dtype=torch.float32)}
    base = hugging_face_directory(tmp_path / "hf", tensors)
    with busy_background():
        future = async_save(tensors, tmp_path / "a", base=base, frozen="*")
        assert not bases._hashes()
    future.result()

    assert own_bytes(tmp_path / "a") < 10_000


def test_plain_files_that_an_earlier_save_has_read_are_compared_at_the_call(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(LARGE, dtype=torch.float32)}
    base = hugging_face_directory(tmp_path / "hf", tensors)
    assert kept(tensors, tmp_path / "a", base) == set()

    async_save(tensors, tmp_path / "a", base=base).result()

    assert own_bytes(tmp_path / "a") < 10_000
    assert kept(tensors, tmp_path / "b", base) == {"w"}


def test_what_is_known_of_plain_files_ends_when_they_are_replaced(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(LARGE, dtype=torch.float32)}
    base = hugging_face_directory(tmp_path / "hf", tensors)
    reshard.save(tensors, checkpoint_id=tmp_path / "a", base=base)
    path = base / "model.safetensors"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    reshard.save(tensors, checkpoint_id=tmp_path / "b", base=base)

    assert torch.equal(reshard.read_state_dict(tmp_path / "b")["w"], tensors["w"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_hugging_face_base_is_not_copied_either(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    weight = torch.randn(300, 100)
    hugging_face_directory(tmp_path / "hf", {"layer.weight": weight})
    tensors = {"base_model.model.layer.base_layer.weight": weight, "lora": torch.ones(3)}
    assert len(kept(tensors, tmp_path / "a", tmp_path / "hf", frozen=["base_model.*"])) == 1

    async_save(
        tensors,
        tmp_path / "a",
        base=tmp_path / "hf",
        frozen=["base_model.*"],
        async_checkpointer_type=kind,
    ).result()

    assert own_bytes(tmp_path / "a") < 10_000
    found = {name: reshard.read_tensor(tmp_path / "a", name) for name in tensors}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_stager_of_the_users_stages_everything(tmp_path: Path) -> None:
    class Stager(BlockingAsyncStager):
        def stage(self, state_dict: Any, **kwargs: Any) -> Any:
            asked.append(kwargs)
            return super().stage(state_dict, **kwargs)

    asked: list[Any] = []
    tensors = state()
    reshard.save(tensors, checkpoint_id=tmp_path / "a")
    with busy_background():
        future = async_save(
            tensors, tmp_path / "b", base=tmp_path / "a", frozen=["*"], async_stager=Stager()
        )
        tensors["w"].zero_()
    future.result()

    assert asked == [{}]
    assert torch.equal(reshard.read_state_dict(tmp_path / "b")["w"], state()["w"])


# What happens before the background gets to it


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_changed_after_the_call_is_saved_as_it_was(
    kind: AsyncCheckpointerType, known: dict[str, Any], tmp_path: Path
) -> None:
    with busy_background():
        future = async_save(
            known, tmp_path / "third", base=tmp_path / "second", async_checkpointer_type=kind
        )
        known["w"].zero_()
    future.result()

    assert own_bytes(tmp_path / "third") < 10_000
    assert torch.equal(reshard.read_state_dict(tmp_path / "third")["w"], state()["w"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_other_data_takes_the_place_of_is_not_referred_to(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    tensors = state()
    reshard.save(tensors, checkpoint_id=tmp_path / "a")
    with busy_background():
        future = async_save(
            tensors,
            tmp_path / "b",
            base=tmp_path / "a",
            frozen=["w"],
            async_checkpointer_type=kind,
        )
        other = {"w": tensors["w"].clone(), "step": 1}
        other["w"][-1] = -1
        writer = reshard.FileSystemWriter(tmp_path / "a")
        _save_beside_the_queue(other, writer)

    with pytest.raises(BaseError, match=r"does not hold 'w' any more.*replaced meanwhile"):
        future.result()
    assert not (tmp_path / "b").exists()


def _save_beside_the_queue(state_dict: dict[str, Any], writer: reshard.FileSystemWriter) -> None:
    """As another process would: without waiting for what is in flight here."""
    from reshard.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, is_coordinator=True)
    writer.reset()
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("was_there", [False, True])
def test_a_base_that_is_still_being_saved_is_waited_for(
    was_there: bool, kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    class Slow(reshard.FileSystemWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            gate.wait(60)
            super().finish(metadata, results)

    gate, tensors = threading.Event(), state()
    if was_there:
        reshard.save({"w": tensors["w"] + 1, "step": 0}, checkpoint_id=tmp_path / "a")
    first = reshard.async_save(tensors, storage_writer=Slow(tmp_path / "a"))
    options = {"base": tmp_path / "a", "frozen": ["*"], "async_checkpointer_type": kind}
    second = async_save(tensors, tmp_path / "b", **options)
    gate.set()
    first.result()
    second.result()

    assert torch.equal(reshard.read_state_dict(tmp_path / "b")["w"], tensors["w"])
    assert own_bytes(tmp_path / "b") < 10_000


def test_a_save_waits_for_a_background_save_of_its_base(tmp_path: Path) -> None:
    tensors = state()
    gate = threading.Event()
    save_queue().submit(None, lambda: gate.wait(60) and Metadata({}))
    async_save(tensors, tmp_path / "a")
    threading.Timer(0.1, gate.set).start()

    reshard.save(tensors, checkpoint_id=tmp_path / "b", base=tmp_path / "a")

    assert own_bytes(tmp_path / "b") < 10_000


def test_a_base_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="the base cannot be used"):
        async_save(state(), tmp_path / "b", base=tmp_path / "missing")

    assert not (tmp_path / "b").exists()
