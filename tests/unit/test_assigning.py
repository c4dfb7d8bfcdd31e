"""reshard.load(assign=True): tensors are replaced, by views of files where possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.api import MissingKeyError
from reshard.default_planner import DefaultLoadPlanner
from reshard.filesystem import FileSystemReader
from reshard.metadata import MetadataIndex
from reshard.planner import LoadPlan, LoadPlanner
from reshard.tensors.shards import HeldShards, LocalShard
from support.maps import is_mapped, mapped_files


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.inner.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.inner(self.embedding(tokens))))
        return out


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Model, Path]:
    torch.manual_seed(0)
    model = Model().eval()
    reshard.save({"model": model, "step": 7}, checkpoint_id=tmp_path)
    return model, tmp_path


def test_a_module_on_the_meta_device_becomes_usable(saved: tuple[Model, Path]) -> None:
    model, folder = saved
    loaded = on_meta().eval()

    reshard.load({"model": loaded}, checkpoint_id=folder, assign=True)

    tokens = torch.arange(10)
    assert torch.equal(loaded(tokens), model(tokens))
    assert all(is_mapped(tensor, folder) for tensor in loaded.state_dict().values())
    assert len(mapped_files(folder)) == 1


def test_a_module_keeps_its_ties_and_what_requires_grad(saved: tuple[Model, Path]) -> None:
    _, folder = saved
    loaded = on_meta()

    reshard.load({"model": loaded}, checkpoint_id=folder, assign=True)

    assert loaded.head.weight is loaded.embedding.weight
    assert isinstance(loaded.inner.weight, nn.Parameter)
    assert loaded.inner.weight.requires_grad
    assert not loaded.inner.bias.requires_grad
    loaded(torch.arange(10)).sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()


def test_a_module_with_memory_gets_other_tensors(saved: tuple[Model, Path]) -> None:
    model, folder = saved
    loaded = Model()
    before = loaded.inner.weight

    reshard.load({"model": loaded}, checkpoint_id=folder, assign=True)

    assert loaded.inner.weight is not before
    assert torch.equal(loaded.inner.weight, model.inner.weight)
    assert is_mapped(loaded.inner.weight, folder)


def test_entries_of_nested_dicts_are_replaced_in_the_dicts_that_hold_them(
    saved: tuple[Model, Path],
) -> None:
    model, folder = saved
    inner = on_meta().state_dict()
    state_dict = {"model": inner, "step": 0}

    reshard.load(state_dict, checkpoint_id=folder, assign=True)

    assert state_dict["model"] is inner
    assert state_dict["step"] == 7
    assert all(torch.equal(inner[name], value) for name, value in model.state_dict().items())
    # As a module that is given it later needs to know.
    assert inner._metadata["norm"]["version"] == 2  # type: ignore[attr-defined]


def test_containers_of_all_kinds_get_their_tensors(tmp_path: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        return {"list": [torch.full((3,), fill), 1], "tuple": (torch.full((2,), fill), {"n": fill})}

    reshard.save(state(2.0), checkpoint_id=tmp_path)
    state_dict = state(0.0)
    the_list = state_dict["list"]

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert state_dict["list"] is the_list
    assert the_list[0].tolist() == [2.0] * 3
    assert state_dict["tuple"][0].tolist() == [2.0] * 2
    assert state_dict["tuple"][1] == {"n": 2.0}


def test_values_of_a_rank_are_replaced(tmp_path: Path) -> None:
    mine = reshard.per_rank({"state": torch.arange(5), "n": 1})
    reshard.save({"loader": mine}, checkpoint_id=tmp_path)
    state_dict = {"loader": reshard.per_rank({"state": torch.zeros(5, dtype=torch.int64), "n": 0})}

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert state_dict["loader"]["state"].tolist() == [0, 1, 2, 3, 4]
    assert state_dict["loader"]["n"] == 1


def test_parameters_stay_parameters(tmp_path: Path) -> None:
    reshard.save({"p": torch.ones(3), "t": torch.ones(3)}, checkpoint_id=tmp_path)
    state_dict = {
        "p": nn.Parameter(torch.zeros(3), requires_grad=False),
        "t": torch.zeros(3, requires_grad=True),
    }

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert isinstance(state_dict["p"], nn.Parameter)
    assert not state_dict["p"].requires_grad
    assert state_dict["t"].requires_grad
    assert state_dict["t"].is_leaf


def test_a_tensor_of_another_dtype_is_read_into_that_dtype(tmp_path: Path) -> None:
    reshard.save({"x": torch.arange(4.0), "y": torch.arange(4.0)}, checkpoint_id=tmp_path)
    state_dict = {
        "x": torch.empty(4, dtype=torch.bfloat16, device="meta"),
        "y": torch.empty(4, device="meta"),
    }

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert state_dict["x"].dtype is torch.bfloat16
    assert state_dict["x"].tolist() == [0, 1, 2, 3]
    assert not is_mapped(state_dict["x"], tmp_path)
    assert is_mapped(state_dict["y"], tmp_path)


def test_a_tensor_with_other_strides_keeps_them(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 4)
    reshard.save({"x": image}, checkpoint_id=tmp_path)
    state_dict = {"x": torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)}

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert torch.equal(state_dict["x"], image)
    assert state_dict["x"].is_contiguous(memory_format=torch.channels_last)


def test_an_empty_tensor_gets_memory(tmp_path: Path) -> None:
    reshard.save({"x": torch.empty(0, 4)}, checkpoint_id=tmp_path)
    state_dict = {"x": torch.empty(0, 4, device="meta")}

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert state_dict["x"].is_cpu
    assert state_dict["x"].shape == (0, 4)


# Ties: the template decides


def test_what_was_tied_is_not_tied_where_the_template_is_not(tmp_path: Path) -> None:
    shared = torch.ones(6)
    reshard.save({"a": shared, "b": shared}, checkpoint_id=tmp_path)
    state_dict = {"a": torch.zeros(6), "b": torch.zeros(6)}

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)
    state_dict["a"] += 1

    assert state_dict["b"].tolist() == [1.0] * 6


def test_what_was_tied_is_tied_where_the_template_is(tmp_path: Path) -> None:
    shared = torch.ones(6)
    reshard.save({"a": shared, "b": shared}, checkpoint_id=tmp_path)
    template = torch.zeros(6)
    state_dict = {"a": template, "b": template.detach()}

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert state_dict["a"] is state_dict["b"]
    assert is_mapped(state_dict["a"], tmp_path)


def test_a_tied_template_of_two_stored_tensors_gets_the_last_as_without_assign(
    tmp_path: Path,
) -> None:
    reshard.save({"a": torch.ones(6), "b": torch.full((6,), 2.0)}, checkpoint_id=tmp_path)
    for assign in (False, True):
        template = torch.zeros(6)
        state_dict = {"a": template, "b": template.detach()}
        reshard.load(state_dict, checkpoint_id=tmp_path, assign=assign)
        assert state_dict["a"].tolist() == state_dict["b"].tolist() == [2.0] * 6


def test_a_tied_template_of_a_viewable_and_another_tensor_gets_the_last(tmp_path: Path) -> None:
    halves = [LocalShard((0, at), (6, 1), torch.full((6, 1), 1.0)) for at in (0, 1)]
    stored = {
        "pieces": HeldShards(torch.float32, (6, 2), False, tuple(halves)),
        "whole": torch.full((6, 2), 2.0),
    }
    reshard.save(stored, checkpoint_id=tmp_path)
    template = torch.zeros(6, 2)
    for names, last in ((("pieces", "whole"), 2.0), (("whole", "pieces"), 1.0)):
        state_dict = {name: template.detach() for name in names}
        reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)
        assert all(state_dict[name].unique().tolist() == [last] for name in names)


# What is left as it is


def test_keys_that_are_missing_or_excluded_keep_their_tensors(tmp_path: Path) -> None:
    reshard.save({"x": torch.ones(3), "left": torch.ones(3)}, checkpoint_id=tmp_path)
    state_dict = {"x": torch.zeros(3), "left": torch.zeros(3), "new": torch.zeros(3)}
    before = dict(state_dict)

    report = reshard.load(
        state_dict, checkpoint_id=tmp_path, assign=True, strict=False, exclude=["left"]
    )

    assert report.loaded == ["x"]
    assert state_dict["x"].tolist() == [1.0] * 3
    assert state_dict["left"] is before["left"]
    assert state_dict["new"] is before["new"]


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    reshard.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    state_dict = {"x": torch.zeros(3), "y": torch.zeros(3)}
    before = dict(state_dict)

    with pytest.raises(MissingKeyError):
        reshard.load(state_dict, checkpoint_id=tmp_path, assign=True)

    assert all(state_dict[name] is before[name] for name in before)
    assert not state_dict["x"].any()


def test_an_object_that_does_not_take_assign_is_filled_in_place(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, n: float) -> None:
            self.n = torch.tensor([n])

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing to do: the state is the live tensor."""

    reshard.save({"counter": Counter(5.0)}, checkpoint_id=tmp_path)
    counter = Counter(0.0)

    reshard.load({"counter": counter}, checkpoint_id=tmp_path, assign=True)

    assert counter.n.item() == 5.0


def test_a_load_without_assign_fills_memory_as_ever(saved: tuple[Model, Path]) -> None:
    _, folder = saved
    loaded = Model()
    before = loaded.inner.weight.data_ptr()

    reshard.load({"model": loaded}, checkpoint_id=folder)

    assert loaded.inner.weight.data_ptr() == before
    assert mapped_files(folder) == []


# Code of users


def test_names_can_be_changed(tmp_path: Path) -> None:
    reshard.save({"model": {"x": torch.ones(3)}}, checkpoint_id=tmp_path)
    state_dict = {"x": torch.empty(3, device="meta")}

    reshard.load(state_dict, checkpoint_id=tmp_path, assign=True, rename={"model": ""})

    assert state_dict["x"].tolist() == [1.0] * 3
    assert is_mapped(state_dict["x"], tmp_path)


def test_a_planner_that_looks_up_tensors_itself_is_refused(tmp_path: Path) -> None:
    class Planner(DefaultLoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return torch.empty(3)

    reshard.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"assign needs a planner .* unlike Planner"):
        reshard.load({"x": torch.zeros(3)}, checkpoint_id=tmp_path, planner=Planner(), assign=True)


def test_a_planner_that_flattens_nothing_works(tmp_path: Path) -> None:
    reshard.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    state_dict = {"x": torch.empty(3, device="meta")}

    planner = DefaultLoadPlanner(flatten_state_dict=False)
    reshard.load(state_dict, checkpoint_id=tmp_path, planner=planner, assign=True)

    assert state_dict["x"].tolist() == [1.0] * 3


def test_a_storage_that_reads_by_itself_gets_memory_to_fill(tmp_path: Path) -> None:
    class Reader(FileSystemReader):
        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
            for item in plan.items:
                assert planner.resolve_tensor(item).is_cpu
            return super().read_data(plan, planner)

    reshard.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    state_dict = {"x": torch.empty(3, device="meta")}

    reshard.load(state_dict, storage_reader=Reader(tmp_path), assign=True)

    assert state_dict["x"].tolist() == [1.0] * 3
    assert not is_mapped(state_dict["x"], tmp_path)


def test_a_planner_that_was_used_with_assign_fills_in_place_afterwards(tmp_path: Path) -> None:
    reshard.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner()
    reshard.load({"x": torch.zeros(3)}, checkpoint_id=tmp_path, planner=planner, assign=True)
    mine = torch.zeros(3)

    reshard.load({"x": mine}, checkpoint_id=tmp_path, planner=planner)

    assert mine.tolist() == [1.0] * 3
