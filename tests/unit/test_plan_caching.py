"""Plan caching: a second save with the same layout sends a fingerprint, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from reshard.api import CoverageError, StalePlanError
from reshard.default_planner import DefaultLoadPlanner, DefaultSavePlanner, PlanCache
from reshard.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from reshard.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from reshard.plans.wire import encode_answer, encode_save_plan
from support.fake_ranks import distributed, mesh_of, on_each_rank
from support.memory_storage import MemoryCheckpoint, load_from_memory, plan_save, save_in_memory

State = dict[str, Any]


def caching(count: int) -> list[DefaultSavePlanner]:
    return [DefaultSavePlanner(enable_plan_caching=True) for _ in range(count)]


def model(**extra: Any) -> State:
    return {"model": {"w": torch.ones(4, 3), "b": torch.ones(3)}, "step": 1, **extra}


def local_plans(planners: list[DefaultSavePlanner], state_dicts: list[State]) -> list[SavePlan]:
    for planner, state_dict in zip(planners, state_dicts, strict=True):
        planner.set_up_planner(state_dict)
    return [planner.create_local_plan() for planner in planners]


def names(plans: list[SavePlan]) -> list[list[str]]:
    return [sorted(item.index.fqn for item in plan.items) for plan in plans]


def fresh(state_dicts: list[State]) -> tuple[list[SavePlan], Metadata]:
    """What planners without a memory make of it."""
    return plan_save([DefaultSavePlanner() for _ in state_dicts], state_dicts)


def assert_saved_as_if_planned_anew(
    planners: list[DefaultSavePlanner], state_dicts: list[State]
) -> None:
    plans, metadata = plan_save(planners, state_dicts)
    expected_plans, expected_metadata = fresh(state_dicts)
    assert [plan.items for plan in plans] == [plan.items for plan in expected_plans]
    assert metadata == expected_metadata


# The same layout again


def test_the_first_plan_is_sent_in_full() -> None:
    (plan,) = local_plans(caching(1), [model()])
    assert plan.usable
    assert len(plan.items) == 3


def test_the_second_plan_is_a_fingerprint_of_at_most_64_bytes() -> None:
    planners = caching(2)
    large = {f"layers.{n}.weight": torch.ones(2) for n in range(1000)}
    plan_save(planners, [large] * 2)
    for plan in local_plans(planners, [large] * 2):
        assert not plan.usable
        assert len(plan.items) == 0
        assert len(encode_save_plan(plan)) <= 64


def test_the_answer_to_fingerprints_is_as_small() -> None:
    planners = caching(2)
    plan_save(planners, [model()] * 2)
    sent = local_plans(planners, [model()] * 2)
    answers, _ = planners[0].create_global_plan(sent)
    assert [answer.usable for answer in answers] == [False, False]
    assert max(len(encode_answer(*pair)) for pair in zip(answers, sent, strict=True)) <= 64


def test_the_second_save_carries_out_the_plan_of_the_first() -> None:
    planners = caching(2)
    first, first_metadata = plan_save(planners, [model()] * 2)
    second, second_metadata = plan_save(planners, [model()] * 2)
    assert [plan.items for plan in second] == [plan.items for plan in first]
    assert second_metadata == first_metadata
    assert all(plan.usable for plan in second)


def test_the_second_save_writes_the_values_of_the_second_state_dict() -> None:
    planners = caching(2)
    save_in_memory(planners, [{"w": torch.zeros(2), "step": 1}] * 2)
    checkpoint = save_in_memory(planners, [{"w": torch.ones(2), "step": 2}] * 2)
    loaded: State = {"w": torch.zeros(2), "step": 0}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["w"].tolist() == [1, 1]
    assert loaded["step"] == 2


def test_sharded_tensors_are_recognised_when_they_are_laid_out_as_before() -> None:
    planners = caching(3)

    def build(_: int) -> State:
        return {"w": distributed(torch.arange(7.0), mesh_of(3), [Shard(0)])}

    plan_save(planners, on_each_rank(3, build))
    state_dicts = on_each_rank(3, build)
    assert not any(plan.usable for plan in local_plans(planners, state_dicts))
    assert_saved_as_if_planned_anew(planners, state_dicts)


def test_without_the_option_every_plan_is_sent_in_full() -> None:
    planners = [DefaultSavePlanner() for _ in range(2)]
    for _ in range(2):
        assert all(plan.usable for plan in local_plans(planners, [model()] * 2))
        plan_save(planners, [model()] * 2)


# Another layout


@pytest.mark.parametrize(
    "changed",
    [
        {"w": torch.ones(3)},
        {"w": torch.ones(4, dtype=torch.float16)},
        {"w": torch.ones(4), "x": torch.ones(1)},
        {"v": torch.ones(4)},
        {"w": torch.ones(4).requires_grad_()},
        {"w": 1},
        {},
    ],
    ids=["shape", "dtype", "one_more", "name", "grad", "value", "nothing"],
)
def test_any_change_of_the_layout_is_planned_anew(changed: State) -> None:
    planners = caching(1)
    plan_save(planners, [{"w": torch.ones(4)}])
    (plan,) = local_plans(planners, [changed])
    assert plan.usable
    assert_saved_as_if_planned_anew(planners, [changed])


def test_the_same_names_nested_in_another_way_are_planned_anew() -> None:
    planners = caching(1)
    plan_save(planners, [{"a.b": torch.ones(1)}])
    assert_saved_as_if_planned_anew(planners, [{"a": {"b": torch.ones(1)}}])


def test_a_change_on_one_rank_only_is_merged_with_what_the_others_had() -> None:
    planners = caching(3)
    plan_save(planners, [model()] * 3)
    state_dicts = [model(), model(extra=torch.ones(50)), model()]
    assert [plan.usable for plan in local_plans(planners, state_dicts)] == [False, True, False]
    assert_saved_as_if_planned_anew(planners, state_dicts)


def test_only_ranks_whose_final_plan_changed_are_sent_one() -> None:
    planners = caching(2)
    plan_save(planners, [{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    state_dicts = [{"a": torch.ones(2)}, {"b": torch.ones(2), "c": torch.ones(1)}]
    answers, _ = planners[0].create_global_plan(local_plans(planners, state_dicts))
    assert [answer.usable for answer in answers] == [False, True]


def test_a_change_and_back_is_saved_right_each_time() -> None:
    planners = caching(2)
    for extra in ({}, {"x": torch.ones(9)}, {}, {"x": torch.ones(9)}, {"x": torch.ones(9)}):
        assert_saved_as_if_planned_anew(planners, [model(), model(**extra)])


def test_a_change_that_moves_a_replica_to_another_rank_reaches_both_ranks() -> None:
    planners = caching(2)
    shared = torch.ones(10)
    assert_saved_as_if_planned_anew(planners, [{"s": shared}, {"s": shared}])
    assert_saved_as_if_planned_anew(planners, [{"s": shared, "big": torch.ones(99)}, {"s": shared}])
    assert_saved_as_if_planned_anew(planners, [{"s": shared}, {"s": shared, "big": torch.ones(99)}])


# Whose cache it is


def test_two_planners_do_not_share_what_they_remember() -> None:
    first, second = caching(1), caching(1)
    plan_save(first, [model()])
    assert local_plans(second, [model()])[0].usable


def test_planners_of_two_models_can_take_turns() -> None:
    first, second = caching(2), caching(2)
    for _ in range(3):
        assert_saved_as_if_planned_anew(first, [model()] * 2)
        assert_saved_as_if_planned_anew(second, [{"other": torch.ones(2)}] * 2)


def test_a_cache_that_is_handed_on_is_used_by_the_next_planner() -> None:
    caches = [PlanCache(), PlanCache()]
    plan_save([DefaultSavePlanner(plan_cache=cache) for cache in caches], [model()] * 2)
    successors = [DefaultSavePlanner(plan_cache=cache) for cache in caches]
    assert not any(plan.usable for plan in local_plans(successors, [model()] * 2))
    assert_saved_as_if_planned_anew(successors, [model()] * 2)


def test_a_cache_that_is_handed_to_the_planner_of_another_model_does_no_harm() -> None:
    caches = [PlanCache(), PlanCache()]
    for state_dict in (model(), {"other": torch.ones(2)}, model()):
        planners = [DefaultSavePlanner(plan_cache=cache) for cache in caches]
        assert_saved_as_if_planned_anew(planners, [state_dict] * 2)


def test_changing_the_metadata_that_was_handed_out_does_not_change_the_cached_one() -> None:
    planners = caching(2)
    _, metadata = plan_save(planners, [model()] * 2)
    metadata.storage_data = "where the first checkpoint lies"
    metadata.version = "first"
    _, metadata = plan_save(planners, [model()] * 2)
    assert metadata.storage_data is None
    assert metadata.version is None


def test_changing_the_dicts_in_the_metadata_does_not_change_the_cached_ones() -> None:
    planners = caching(2)
    _, metadata = plan_save(planners, [model()] * 2)
    metadata.planner_data["extra"] = ("extra",)
    del metadata.state_dict_metadata["step"]
    _, metadata = plan_save(planners, [model()] * 2)
    assert metadata == fresh([model()] * 2)[1]


# When something fails


def broken_shard(fqn: str) -> WriteItem:
    """The first half of a tensor whose other half nobody has."""
    half = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    data = TensorWriteData(half, TensorProperties(torch.float32), torch.Size([4]))
    return WriteItem(MetadataIndex(fqn, [0]), WriteItemType.SHARD, tensor_data=data)


class MayOfferHalf(DefaultSavePlanner):
    """Offers an incomplete tensor, on the save that is told to."""

    broken = False

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if not self.broken:
            return plan
        return SavePlan([*plan.items, broken_shard("half")], planner_data=plan.planner_data)


@pytest.mark.parametrize("saves_before", [0, 1])
def test_a_global_plan_that_fails_leaves_nothing_behind(saves_before: int) -> None:
    planners = [MayOfferHalf(enable_plan_caching=True) for _ in range(2)]
    for _ in range(saves_before):
        plan_save(planners, [model()] * 2)
    planners[1].broken = True
    changed = model(new=torch.ones(1))
    with pytest.raises(CoverageError, match="half"):
        plan_save(planners, [changed] * 2)
    planners[1].broken = False
    for _ in range(2):
        assert_saved_as_if_planned_anew(planners, [changed] * 2)


LOST_ANSWER = (
    "BUG: the coordinator counts a plan as known before any rank has it; a save that fails "
    "between create_global_plan and finish_plan leaves the two sides apart"
)


def fail_after_the_global_plan(planners: list[DefaultSavePlanner], states: list[State]) -> None:
    """A save that gets as far as the global plan; no rank ever gets its answer."""
    planners[0].create_global_plan(local_plans(planners, states))


def test_the_first_save_can_be_repeated_when_the_answers_got_lost() -> None:
    planners = caching(2)
    fail_after_the_global_plan(planners, [model()] * 2)
    assert_saved_as_if_planned_anew(planners, [model()] * 2)


def test_a_later_save_can_be_repeated_when_the_answers_got_lost() -> None:
    planners = caching(2)
    plan_save(planners, [model()] * 2)
    changed = [model(), model(new=torch.ones(3))]
    fail_after_the_global_plan(planners, changed)
    assert_saved_as_if_planned_anew(planners, changed)


# Ranks and coordinator that do not know the same


def test_a_fingerprint_that_the_coordinator_does_not_know_names_the_rank() -> None:
    planners = caching(3)
    plan_save(planners, [model()] * 3)
    plans = local_plans(planners, [model()] * 3)
    plans[1] = SavePlan([], planner_data=b"another layout  ", usable=False)
    with pytest.raises(StalePlanError) as raised:
        planners[0].create_global_plan(plans)
    assert "ranks [1] refer to plans that the coordinator does not hold" in str(raised.value)
    assert "forget_cached_plans()" in str(raised.value)


def test_a_new_coordinator_names_every_rank_whose_plan_it_does_not_hold() -> None:
    planners = caching(3)
    plan_save(planners, [model()] * 3)
    plans = local_plans(planners, [model()] * 3)
    with pytest.raises(StalePlanError, match=r"ranks \[0, 1, 2\]"):
        caching(1)[0].create_global_plan(plans)


def test_a_rank_that_does_not_hold_the_plan_of_the_answer_says_so() -> None:
    (planner,) = caching(1)
    with pytest.raises(StalePlanError, match=r"this rank does not hold.*forget_cached_plans"):
        planner.finish_plan(SavePlan([], usable=False))


def test_forgetting_makes_the_next_plan_complete() -> None:
    planners = caching(2)
    plan_save(planners, [model()] * 2)
    for planner in planners:
        planner.forget_cached_plans()
    assert all(plan.usable for plan in local_plans(planners, [model()] * 2))
    assert_saved_as_if_planned_anew(planners, [model()] * 2)


def test_after_forgetting_another_world_size_can_be_saved() -> None:
    planners = caching(3)
    plan_save(planners[:2], [model()] * 2)
    with pytest.raises(StalePlanError, match=r"ranks \[0, 1\]"):
        plan_save(planners, [model()] * 3)
    for planner in planners:
        planner.forget_cached_plans()
    assert_saved_as_if_planned_anew(planners, [model()] * 3)


# Planners that change their plans


class CastsToHalf(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


class LooksAtItems(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.count = sum(1 for _ in plan.items)
        return plan


def tied() -> State:
    weight = torch.ones(2)
    return {"a": weight, "b": weight}


@pytest.mark.parametrize(
    ("planner", "state_dict"), [(CastsToHalf, model()), (LooksAtItems, tied())]
)
def test_a_planner_that_changes_or_reads_its_items_can_cache_its_plans(
    planner: type[DefaultSavePlanner], state_dict: State
) -> None:
    planners = [planner(enable_plan_caching=True) for _ in range(2)]
    first: MemoryCheckpoint = save_in_memory(planners, [state_dict] * 2)
    second = save_in_memory(planners, [state_dict] * 2)
    assert second.metadata == first.metadata
    assert second.written_by == first.written_by


# The views of DCP


VIEWS = {
    "save_plan": SavePlanner._cached_save_plan,
    "final_save_plan": SavePlanner._cached_final_save_plan,
    "all_plans": SavePlanner._cached_all_plans,
    "global_plan": SavePlanner._cached_global_plan,
    "metadata": SavePlanner._cached_metadata,
}


def saved_once(planner: DefaultSavePlanner) -> DefaultSavePlanner:
    (plan,) = local_plans([planner], [model()])
    (answer,), _ = planner.create_global_plan([plan])
    planner.finish_plan(answer)
    return planner


class Named(DefaultSavePlanner):
    """With a key of its own in the views."""


def test_the_class_shows_what_its_planners_remember() -> None:
    assert all("Named" not in view for view in VIEWS.values())
    planner = saved_once(Named(enable_plan_caching=True))
    assert planner._cached_plans_key == "Named"
    assert all("Named" in view for view in VIEWS.values())
    assert names([SavePlanner._cached_save_plan["Named"]]) == names([planner.plan])
    assert SavePlanner._cached_final_save_plan["Named"].items is planner.plan.items
    assert len(SavePlanner._cached_all_plans["Named"]) == 1
    assert SavePlanner._cached_metadata["Named"] is planner.metadata
    assert "Named" in repr(SavePlanner._cached_metadata)
    del planner
    assert all("Named" not in view for view in VIEWS.values())


def test_a_planner_without_a_cache_is_not_shown() -> None:
    planner = saved_once(Named())
    assert "Named" not in SavePlanner._cached_final_save_plan
    assert planner.plan


@pytest.mark.parametrize("view", VIEWS)
def test_to_delete_from_a_view_makes_planners_of_that_key_plan_anew(view: str) -> None:
    planners = [saved_once(Named(enable_plan_caching=True)) for _ in range(2)]
    other = saved_once(DefaultSavePlanner(enable_plan_caching=True))
    del VIEWS[view]["Named"]
    assert all("Named" not in each for each in VIEWS.values())
    assert [plan.usable for plan in local_plans(planners, [model()] * 2)] == [True, True]
    assert [plan.usable for plan in local_plans([other], [model()])] == [False]
    with pytest.raises(KeyError):
        del VIEWS[view]["Named"]


def test_a_view_can_be_cleared_but_not_written_to() -> None:
    planner = saved_once(Named(enable_plan_caching=True))
    with pytest.raises(TypeError, match="PlanCache"):
        SavePlanner._cached_metadata["Named"] = None
    SavePlanner._cached_save_plan.clear()
    assert local_plans([planner], [model()])[0].usable
