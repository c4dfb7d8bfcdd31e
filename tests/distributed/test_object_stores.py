"""Checkpoints on a real object store: from any ranks to any others, whatever fails between."""

from __future__ import annotations

import logging
import time
from typing import Any

import obstore
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
from support.background import PROCESS, SECONDS, THREAD
from support.faulty_proxy import Fault, FaultyProxy, Kind, Request, seeded
from support.object_servers import ACCESS_KEY, BUCKET, SECRET_KEY, Place, closed_port
from support.ranks import run_ranks
from support.samples import SHAPES, same_bits, sample

Options = dict[str, Any]
HOWS = ["sync", THREAD, PROCESS]
PROMPTLY_SECONDS = 5.0


def state(placement: Any, seed: int = 0) -> dict[str, Any]:
    """Awkward tensors, spread over the ranks where they have rows enough; and values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: dict[str, Any] = {}
    for name in SHAPES:
        whole = sample(name, seed)
        spread = placement if whole.ndim > getattr(placement, "dim", 0) else Replicate()
        tensors[name] = distribute_tensor(whole, mesh, [spread], src_data_rank=None)
    return {"model": tensors, "step": seed, "notes": ["text", None]}


def save(url: str, options: Options, how: Any, seed: int = 0) -> None:
    saved = state(Shard(0), seed)
    if how == "sync":
        reshard.save(saved, checkpoint_id=url, storage_options=options)
        return
    future = reshard.async_save(
        saved, checkpoint_id=url, storage_options=options, async_checkpointer_type=how
    )
    future.result(SECONDS)
    reshard.close()


def differences(url: str, options: Options, seed: int = 0) -> list[str]:
    """What a load into another layout gets wrong."""
    found = state(Shard(1), seed + 1)
    report = reshard.load(found, checkpoint_id=url, storage_options=options)
    assert report.requests > 0
    wanted = state(Shard(1), seed)
    wrong = [
        name
        for name, tensor in wanted["model"].items()
        if not same_bits(found["model"][name].to_local(), tensor.to_local())
    ]
    return wrong + [key for key in ("step", "notes") if found[key] != wanted[key]]


@pytest.mark.parametrize("how", HOWS, ids=["sync", "thread", "process"])
def test_a_save_of_two_ranks_is_loaded_on_three_with_another_layout(how: Any, s3: Place) -> None:
    run_ranks(2, save, s3.url, s3.options, how)

    assert ".metadata" in s3.names()
    assert s3.uploads() == []
    assert run_ranks(3, differences, s3.url, s3.options) == [[]] * 3


@pytest.mark.parametrize(
    ("how", "seed"),
    [
        ("sync", 1),
        pytest.param(THREAD, 2, marks=pytest.mark.slow),
        pytest.param(PROCESS, 3, marks=pytest.mark.slow),
        *(pytest.param("sync", seed, marks=pytest.mark.slow) for seed in range(10, 20)),
    ],
)
def test_with_a_tenth_of_all_requests_failing_every_bit_is_saved_and_loaded(
    how: Any, seed: int, s3: Place, s3_proxy: FaultyProxy
) -> None:
    options = s3.through(s3_proxy.endpoint).options
    s3_proxy.script = seeded(seed, 0.1)
    run_ranks(2, save, s3.url, options, how)
    assert run_ranks(3, differences, s3.url, options) == [[]] * 3
    assert s3_proxy.counts.faults

    s3_proxy.script = lambda request: None
    assert run_ranks(2, differences, s3.url, options) == [[]] * 2


def attempt_save(url: str, options: Options, how: Any) -> tuple[str, float, bool]:
    """What a save says that cannot work, how long it takes, and whether training can go on."""
    began = time.monotonic()
    told = ""
    try:
        save(url, options, how, seed=1)
    except reshard.CheckpointException as error:
        told = str(error)
    seconds = time.monotonic() - began
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return told, seconds, ones.item() == dist.get_world_size()


@pytest.mark.parametrize(
    "how",
    ["sync", pytest.param(THREAD, marks=pytest.mark.slow)],
    ids=["sync", "thread"],
)
def test_a_server_that_goes_away_in_the_middle_fails_every_rank_within_the_limit(
    how: Any, s3: Place, s3_proxy: FaultyProxy
) -> None:
    options = {**s3.through(s3_proxy.endpoint).options, "retry_seconds": 1.0}

    def script(request: Request) -> Fault | None:
        if request.method == "PUT" and request.path.endswith(".safetensors"):
            s3_proxy.go_away()
            return Fault("reset")
        return None

    s3_proxy.script = script
    for told, seconds, goes_on in run_ranks(2, attempt_save, s3.url, options, how):
        assert "within 1 s" in told
        assert s3.url in told
        assert SECRET_KEY not in told
        assert seconds < 1 + PROMPTLY_SECONDS
        assert goes_on
    assert ".metadata" not in s3.names()
    # Nothing that it left is in the way.
    run_ranks(2, save, s3.url, s3.options, "sync")
    assert run_ranks(2, differences, s3.url, s3.options) == [[]] * 2


@pytest.mark.parametrize(
    "what", ["secret", "bucket", pytest.param("server", marks=pytest.mark.slow)]
)
def test_a_save_and_a_load_that_can_never_work_say_so_at_once_on_every_rank(
    what: str, s3: Place
) -> None:
    url, options = s3.url, dict(s3.options)
    match what:
        case "secret":
            options["secret_access_key"] = f"{SECRET_KEY}-wrong"
            advice = "Check the credentials"
        case "bucket":
            url = url.replace(BUCKET, "no-such-bucket")
            advice = "the bucket does not exist"
        case _:
            options["endpoint"] = f"http://127.0.0.1:{closed_port()}"
            advice = "Check the endpoint"
    for told, seconds in run_ranks(2, attempt_both, url, options):
        assert seconds < 2 * PROMPTLY_SECONDS
        for text in told:
            assert advice in text
            assert url.partition("/quite")[0].rpartition("/")[0] in text
            assert SECRET_KEY not in text
            assert ACCESS_KEY not in text


def attempt_both(url: str, options: Options) -> tuple[list[str], float]:
    began = time.monotonic()
    told = []
    for call in (reshard.save, reshard.load):
        try:
            call(state(Shard(0)), checkpoint_id=url, storage_options=options)
        except reshard.CheckpointException as error:
            told.append(f"{error} {error!r} {error.failures!r}")
    return told, time.monotonic() - began


def test_nothing_that_is_written_or_logged_holds_a_secret(
    s3: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    reshard.save(
        {"a": torch.arange(4)}, checkpoint_id=s3.url, storage_options=s3.options, no_dist=True
    )
    reshard.load(
        {"a": torch.arange(4)}, checkpoint_id=s3.url, storage_options=s3.options, no_dist=True
    )

    assert ".metadata" in s3.names()
    for key in s3.names():
        content = bytes(obstore.get(s3.store(), f"{s3.prefix}/{key}").bytes())
        assert SECRET_KEY.encode() not in content, key
        assert ACCESS_KEY.encode() not in content, key
    assert SECRET_KEY not in caplog.text
    writer = reshard.ObjectStoreWriter(s3.url, storage_options=s3.options)
    assert SECRET_KEY not in f"{writer!r} {vars(writer)!r}"


@pytest.mark.parametrize("kind", ["403", pytest.param("500", marks=pytest.mark.slow)])
def test_a_save_that_fails_leaves_the_checkpoint_before_it(
    kind: Kind, s3: Place, s3_proxy: FaultyProxy
) -> None:
    options = {**s3.through(s3_proxy.endpoint).options, "retry_seconds": 1.0}
    run_ranks(2, save, s3.url, options, "sync", 0)
    before = s3.names()
    s3_proxy.script = lambda request: (
        Fault(kind) if request.method == "PUT" and request.path.endswith("/.metadata") else None
    )
    for told, _, goes_on in run_ranks(2, attempt_save, s3.url, options, "sync"):
        assert kind in told
        assert goes_on
    assert run_ranks(2, differences, s3.url, s3.options) == [[]] * 2
    assert s3.uploads() == []
    assert set(before) <= set(s3.names())


def test_tensors_and_regions_are_read_alone(s3: Place) -> None:
    large = torch.randn(600, 500)
    reshard.save(
        {"a": {"large": large, "small": torch.arange(3)}, "step": 5},
        checkpoint_id=s3.url,
        storage_options=s3.options,
        no_dist=True,
    )
    read = reshard.read_tensor(s3.url, "a.large", storage_options=s3.options)
    region = reshard.read_tensor(
        s3.url, "a.large", (slice(10, 20), slice(3, 7)), storage_options=s3.options
    )
    found = reshard.read_state_dict(s3.url, storage_options=s3.options)

    assert same_bits(read, large)
    assert same_bits(region, large[10:20, 3:7])
    assert found["step"] == 5
    assert same_bits(found["a"]["large"], large)
