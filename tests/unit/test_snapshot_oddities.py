"""reshard.snapshots: values that are built in unusual ways, and memory of other kinds."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata
from torch.testing._internal.two_tensor import TwoTensor

from reshard.api import UnsupportedLayoutError
from reshard.snapshots.pool import StagingPool
from support.fake_ranks import as_rank
from support.subclasses import Opaque, Tagged

# Containers


class Arguments(tuple[Any, ...]):
    """A tuple that is made from its elements one by one."""

    def __new__(cls, *elements: Any) -> Arguments:
        return super().__new__(cls, elements)


def test_a_tuple_of_a_type_of_its_own_keeps_its_elements(pool: StagingPool) -> None:
    twin = pool.stage({"w": Arguments(torch.ones(1), torch.zeros(1))})["w"]
    assert [element.item() for element in twin] == [1, 0]


class Shared(dict[str, Any]):
    """A dict of which there is only one."""

    def __copy__(self) -> Shared:
        return self


class SharedList(list[Any]):
    def __copy__(self) -> SharedList:
        return self


@pytest.mark.parametrize("make", [lambda w: Shared(w=w), lambda w: SharedList([w])])
def test_a_container_that_does_not_let_itself_be_copied_is_not_changed(
    pool: StagingPool, make: Any
) -> None:
    weight = torch.ones(2)
    container = make(weight)
    pool.stage({"w": container})
    (content,) = container.values() if isinstance(container, dict) else container
    assert content is weight


class Obliging:
    """Has every attribute that it is asked for, as some configurations do."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__") and name != "__replace_value__":
            raise AttributeError(name)


def test_an_object_with_every_attribute_is_not_taken_for_a_mark(pool: StagingPool) -> None:
    assert type(pool.stage({"config": Obliging()})["config"]) is Obliging


# Tensors


@pytest.mark.parametrize("value", [threading.Lock(), torch.ones(1, requires_grad=True) * 2])
def test_an_attribute_that_cannot_be_copied_is_refused_by_the_path_of_its_tensor(
    pool: StagingPool, value: Any
) -> None:
    tagged = torch.ones(3).as_subclass(Tagged)
    tagged.extra = value
    with pytest.raises(UnsupportedLayoutError, match=r"layer\.w"):
        pool.stage({"layer": {"w": tagged}})


def test_a_subclass_whose_parts_begin_their_storages_is_copied_with_its_ties(
    pool: StagingPool,
) -> None:
    tied = TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))
    staged = pool.stage({"embedding": tied, "head": tied})
    staged["embedding"].b.fill_(5)
    assert staged["head"].b.sum().item() == 30


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_sharded_tensor_is_copied_into_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, pool: StagingPool
) -> None:
    with as_rank(0, 1):
        shard = LocalShard(torch.ones(2), ShardMetadata([0], [2], "rank:0/cpu"))
        original = sharded_tensor.init_from_local_shards([shard], 2)
        # All memory is, in want of an accelerator that could pin it.
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
        (twin,) = pool.stage({"w": original})["w"].local_shards()
        assert twin.tensor.tolist() == [1, 1]


def test_what_a_stager_of_the_user_made_may_consist_of_anything(pool: StagingPool) -> None:
    staged = pool.stage({"w": torch.ones(2)})
    assert pool.leases_of({"w": staged["w"], "own": Opaque(torch.ones(2))}) == [staged.lease]
