"""async_save(staging="overlap"): what is saved is the state at the call, however training goes."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import reshard
from reshard.api import CheckpointException
from reshard.background import overlap
from reshard.background.overlap import late_copies
from reshard.snapshots.pool import StagingPool, staging_pool
from reshard.staging import DefaultStager
from reshard.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from reshard.training import TrainState
from support.background import wait_until
from support.held_copies import SECONDS, HeldCopies
from support.whole import differences

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "AdamW in a loop": lambda p: optim.AdamW(p, lr=0.1, foreach=False),
    "fused AdamW": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD without state": lambda p: optim.SGD(p, lr=0.1),
}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopies]:
    held = HeldCopies(monkeypatch)
    yield held
    held.grant(1000)
    reshard.close()


class Training:
    """A run of which everything changes: also what no step of an optimizer changes."""

    def __init__(self, make: Callable[[Any], optim.Optimizer] = OPTIMIZERS["AdamW"]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)
        )
        self.ema = copy.deepcopy(self.model)
        self.optimizer = make(self.model.parameters())
        self.scheduler = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.extra: dict[str, Any] = {"ema": self.ema, "tokens": torch.zeros(1), "epoch": 0}
        self.state = {
            "train": TrainState(self.model, self.optimizer, self.scheduler, extra=self.extra)
        }
        self.forward_and_backward()
        self.step()

    def forward_and_backward(self) -> None:
        self.model(torch.randn(6, 4)).square().sum().backward()
        self.extra["tokens"] += 6
        self.extra["epoch"] += 1

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        with torch.no_grad():
            for mean, new in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(new, 0.5)

    def start_save(self, place: Path, **options: Any) -> AsyncSaveResponse:
        """Save now what the background save has to match, and begin that one."""
        reshard.save(self.state, checkpoint_id=place / "expected")
        return save_over(self.state, place / "found", **options)


def save_over(state: dict[str, Any], place: Path, **options: Any) -> AsyncSaveResponse:
    saving = reshard.async_save(state, checkpoint_id=place, staging="overlap", **options)
    assert isinstance(saving, AsyncSaveResponse)
    return saving


def check(place: Path, saving: AsyncSaveResponse) -> None:
    saving.staging_completion.result(SECONDS)
    saving.upload_completion.result(SECONDS)
    found, expected = (reshard.read_state_dict(place / name) for name in ("found", "expected"))
    assert not differences(found, expected)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_that_goes_on_changes_nothing_of_what_is_saved(
    held: HeldCopies, tmp_path: Path, make: Callable[[Any], optim.Optimizer]
) -> None:
    training = Training(make)
    saving = training.start_save(tmp_path)
    training.forward_and_backward()
    assert not saving.staging_completion.done()
    training.step()
    assert held.waits == [training.optimizer]
    check(tmp_path, saving)


def test_backward_passes_before_a_step_do_not_wait(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    saving = training.start_save(tmp_path)
    for _ in range(3):
        training.forward_and_backward()
    assert not held.waits
    training.step()
    check(tmp_path, saving)


def test_parameters_and_optimizer_state_are_copied_late_and_all_else_at_once(
    held: HeldCopies, tmp_path: Path
) -> None:
    training = Training()
    saving = training.start_save(tmp_path)
    reshard.finish_staging()
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    late = sorted(each.data_ptr() for each in [*training.model.parameters(), *states])
    assert sorted(move.source.data_ptr() for move in held.copied) == late
    check(tmp_path, saving)


def test_a_step_in_another_thread_waits(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    saving = training.start_save(tmp_path)
    training.forward_and_backward()
    stepping = threading.Thread(target=training.step)
    stepping.start()
    stepping.join(SECONDS)
    assert not stepping.is_alive()
    assert held.waits == [training.optimizer]
    check(tmp_path, saving)


def test_a_hook_that_another_thread_steps_through_is_not_taken_away_from_it(
    held: HeldCopies, tmp_path: Path
) -> None:
    training = Training()
    for number in range(2):
        saving = training.start_save(tmp_path / str(number))
        stepping = threading.Thread(target=training.optimizer.step)
        stepping.start()
        stepping.join(SECONDS)
        check(tmp_path / str(number), saving)
        reshard.close()
    assert len(training.optimizer._optimizer_step_pre_hooks) == 1


def test_what_is_owned_by_the_optimizer_that_steps_first_is_copied_first(
    held: HeldCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "_BATCH_BYTES", 1)
    monkeypatch.setattr(held, "grant", lambda batches: None)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizers = [optim.SGD(each.parameters(), lr=1.0) for each in (first, second)]
    state = {"train": TrainState({"a": first, "b": second}, optimizers, rng=False)}
    reshard.save(state, checkpoint_id=tmp_path / "expected")
    saving = save_over(state, tmp_path / "found")
    (second(torch.ones(3)).sum() + first(torch.ones(3)).sum()).backward()
    stepping = threading.Thread(target=optimizers[1].step)
    stepping.start()
    wait_until(lambda: bool(late_copies()._running[0]._wanted))
    # One that was begun, and the two of the second.
    held.permits.release(3)
    stepping.join(SECONDS)
    assert not stepping.is_alive()
    assert not saving.staging_completion.done()
    order = [move.source.data_ptr() for move in held.copied]
    assert order[0] == first.weight.data_ptr()
    assert order[1:] == [second.weight.data_ptr(), second.bias.data_ptr()]
    held.permits.release(1)
    optimizers[0].step()
    check(tmp_path, saving)


def test_a_tensor_of_two_optimizers_is_copied_before_either_steps(
    held: HeldCopies, tmp_path: Path
) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizers = [optim.SGD([weight], lr=1.0), optim.SGD([weight], lr=2.0)]
    reshard.save({"w": weight}, checkpoint_id=tmp_path / "expected")
    saving = save_over({"w": weight}, tmp_path / "found", optimizers=optimizers)
    assert late_copies()._running[0]._unfinished == [1, 1]
    optimizers[1].step()
    check(tmp_path, saving)
    assert weight[0] == -1


def test_a_load_waits_for_the_copy(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    reshard.save(training.state, checkpoint_id=tmp_path / "old")
    training.forward_and_backward()
    training.step()
    saving = training.start_save(tmp_path)
    reshard.load(training.state, checkpoint_id=tmp_path / "old")
    assert held.waits
    check(tmp_path, saving)


def test_load_state_dict_of_a_train_state_waits_for_the_copy(
    held: HeldCopies, tmp_path: Path
) -> None:
    training, other = Training(), Training(OPTIMIZERS["fused AdamW"])
    other.forward_and_backward()
    other.step()
    saving = training.start_save(tmp_path)
    training.state["train"].load_state_dict(copy.deepcopy(other.state["train"].state_dict()))
    assert held.waits == [None]
    check(tmp_path, saving)


def test_a_second_save_waits_for_the_copy_of_the_first(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    saving = training.start_save(tmp_path / "first")
    second = training.start_save(tmp_path / "second")
    assert held.waits == [None]
    check(tmp_path / "first", saving)
    training.forward_and_backward()
    training.step()
    check(tmp_path / "second", second)


def test_a_change_by_hand_fails_the_save_rather_than_store_a_mixture(
    held: HeldCopies, tmp_path: Path
) -> None:
    training = Training()
    saving = training.start_save(tmp_path)
    with torch.no_grad():
        training.model[0].weight.zero_()
    training.optimizer.step()
    with pytest.raises(CheckpointException, match=r"finish_staging\(\) before changing"):
        saving.upload_completion.result(SECONDS)
    with pytest.raises(CheckpointException, match="1 tensors of AdamW were changed"):
        saving.staging_completion.result(SECONDS)
    assert not (tmp_path / "found").exists()


def test_after_finish_staging_parameters_may_be_changed_by_hand(
    held: HeldCopies, tmp_path: Path
) -> None:
    training = Training()
    saving = training.start_save(tmp_path)
    reshard.finish_staging()
    with torch.no_grad():
        training.model[0].weight.zero_()
    check(tmp_path, saving)


def test_a_copy_that_fails_lets_the_step_go_on_and_the_next_save_too(
    held: HeldCopies, tmp_path: Path
) -> None:
    training = Training()
    held.failure = RuntimeError("the memory is gone")
    saving = training.start_save(tmp_path)
    training.forward_and_backward()
    training.step()
    with pytest.raises(CheckpointException, match="the memory is gone"):
        saving.upload_completion.result(SECONDS)
    assert saving.staging_completion.exception(SECONDS) is held.failure
    wait_until(lambda: not staging_pool()._busy)
    held.failure = None
    saving = training.start_save(tmp_path)
    training.forward_and_backward()
    training.step()
    check(tmp_path, saving)


def test_close_waits_for_the_copy_and_removes_the_hooks(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    saving = training.start_save(tmp_path)
    assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    held.grant(100)
    reshard.close()
    assert saving.upload_completion.done()
    assert not training.optimizer._optimizer_step_pre_hooks
    check(tmp_path, saving)


def test_hooks_that_follow_ours_are_called(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    saving = training.start_save(tmp_path)
    called: list[bool] = []
    training.optimizer.register_step_pre_hook(lambda *_: called.append(True))
    training.forward_and_backward()
    training.step()
    assert called
    check(tmp_path, saving)


def test_an_optimizer_that_calls_no_hooks_has_its_state_copied_at_once(
    held: HeldCopies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(optim.SGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # As profilers do.
            type(self).step = lambda self: optim.SGD.step.__wrapped__(self)  # type: ignore[attr-defined]

    training = Training(lambda p: Own(p, lr=0.1, momentum=0.9))
    with caplog.at_level(logging.WARNING, "reshard.background.overlap"):
        saving = training.start_save(tmp_path)
    assert "Own calls no hooks" in caplog.text
    training.forward_and_backward()
    training.step()
    assert not held.copied
    check(tmp_path, saving)


def test_a_buffer_between_parameters_in_one_storage_is_copied_at_once(
    held: HeldCopies, tmp_path: Path
) -> None:
    arena = torch.arange(9.0)
    weight, buffer, bias = nn.Parameter(arena[:3]), arena[3:6], nn.Parameter(arena[6:])
    strided = nn.Parameter(torch.arange(8.0).reshape(4, 2)[:, :1])
    alone = nn.Parameter(torch.ones(4))
    trained = {"w": weight, "b": bias, "strided": strided, "alone": alone}
    state = {**trained, "part": alone[1:], "buffer": buffer}
    reshard.save(state, checkpoint_id=tmp_path / "expected")
    optimizer = optim.SGD(trained.values(), lr=1.0)
    saving = save_over(state, tmp_path / "found", optimizers=[optimizer])
    buffer.zero_()
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [move.source.data_ptr() for move in held.copied] == [alone.data_ptr()]
    check(tmp_path, saving)


def test_tied_weights_stay_tied(held: HeldCopies, tmp_path: Path) -> None:
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    optimizer = optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    head(embed(torch.tensor([1]))).sum().backward()
    reshard.save(state, checkpoint_id=tmp_path / "expected")
    saving = save_over(state, tmp_path / "found")
    optimizer.step()
    check(tmp_path, saving)


def test_memory_is_used_again_and_given_back(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    sizes = []
    for number in range(4):
        held.again()
        saving = training.start_save(tmp_path / str(number))
        training.forward_and_backward()
        training.step()
        check(tmp_path / str(number), saving)
        wait_until(lambda: not staging_pool()._busy)
        sizes.append(staging_pool().segment_numbers())
    assert len(set(sizes[1:])) == 1


def test_what_a_base_holds_is_not_copied(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    reshard.save(training.state, checkpoint_id=tmp_path / "base")
    saving = training.start_save(tmp_path, base=tmp_path / "base", frozen=["train.model.0.*"])
    training.model[0].requires_grad_(False)
    held.grant(100)
    check(tmp_path, saving)
    frozen = {each.data_ptr() for each in training.model[0].parameters()}
    assert not frozen & {move.source.data_ptr() for move in held.copied}


@pytest.mark.slow
def test_a_process_saves_what_was_copied_late(held: HeldCopies, tmp_path: Path) -> None:
    training = Training()
    saving = training.start_save(tmp_path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    training.forward_and_backward()
    training.step()
    check(tmp_path, saving)


# What is refused


def test_without_optimizers_overlap_is_refused(tmp_path: Path) -> None:
    for state in ({"w": torch.ones(2)}, {"train": TrainState(nn.Linear(2, 2))}):
        with pytest.raises(ValueError, match=r"pass optimizers=\[...\], or put a TrainState"):
            save_over(state, tmp_path / "a")


def test_arguments_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizers = [optim.SGD(model.parameters())]
    with pytest.raises(ValueError, match="'blocking' or 'overlap', not 'later'"):
        reshard.async_save({"m": model}, checkpoint_id=tmp_path / "a", staging="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizers are for staging='overlap'"):
        reshard.async_save({"m": model}, checkpoint_id=tmp_path / "a", optimizers=optimizers)
    with pytest.raises(ValueError, match="the async_stager that was passed"):
        save_over({"m": model}, tmp_path / "a", optimizers=optimizers, async_stager=DefaultStager())


# Memory that is taken in the background


def test_a_save_waits_for_memory_that_is_being_taken(process_pool: StagingPool) -> None:
    state = {"w": torch.arange(1 << 16)}
    take = process_pool.plan_prewarm(state)
    staged: list[Any] = []
    staging = threading.Thread(target=lambda: staged.append(process_pool.stage(state)))
    staging.start()
    take()
    staging.join(SECONDS)
    assert len(process_pool.segment_numbers()) == 1
    assert torch.equal(staged[0]["w"], state["w"])
    staged[0].release()


def test_prewarming_in_the_background_takes_the_memory_of_the_first_save(
    process_pool: StagingPool, tmp_path: Path
) -> None:
    state = {"w": torch.arange(1 << 16)}
    assert reshard.prewarm(state, background=True).result(SECONDS) is None
    before = process_pool.segment_numbers()
    assert len(before) == 1
    reshard.async_save(state, checkpoint_id=tmp_path / "a").result(SECONDS)
    assert process_pool.segment_numbers() == before


def test_prewarming_that_fails_says_so_and_keeps_no_save_waiting(
    process_pool: StagingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.arange(4)}
    with monkeypatch.context() as patch:
        patch.setattr("reshard.snapshots.segments._populate", _no_memory)
        failed = reshard.prewarm(state, background=True).exception(SECONDS)
    assert isinstance(failed, MemoryError)
    process_pool.stage(state).release()


def _no_memory(memory: torch.Tensor) -> None:
    raise OSError("no memory left")
