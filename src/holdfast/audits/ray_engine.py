"""The batches of an audit on a Ray cluster: the same answers as in one process, from as many processes as there are.

A task is a function of the model and of itself only, so that it may be done anywhere, in any order, and once more
where a worker died. Ray (Moritz et al., "Ray: A Distributed Framework for Emerging AI Applications", 2018) starts the
processes, moves the objects and repeats what was lost.
"""

import hashlib
import os
import socket
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
from torch import nn

from holdfast.audits.engine import Engine
from holdfast.audits.task import Found, Task, work
from holdfast.errors import HoldfastError, InputError, UnsupportedError

AHEAD = 2  # tasks under way for each processor: one at work and one that waits, so that no worker does
RETRIES = 3  # of a task whose worker died; a batch that kills every worker must end some time
PATIENCE = 10.0  # seconds that a cluster may take to answer the first call
_held: dict[str, nn.Module] = {}  # in a worker: the model it works on, by digest
_joined: "weakref.WeakValueDictionary[str, _Connection]" = weakref.WeakValueDictionary()  # none or one


class _Connection:
    """Ends with the last reference to it: a cluster that was started is shut down, one that was joined left running."""


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """An engine that spreads the tasks over a Ray cluster, one thread for each; docs/scaling.md says more.

    Args:
        address: of a running cluster, such as "auto" or "10.0.0.1:6379"; the environment's RAY_ADDRESS if not given.
            Where neither is, a cluster is started on this machine, and shut down when the engine is no longer in use.
        workers: most tasks at a time; as many as the cluster has processors if not given.
    """
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError(
            "the engine 'ray' needs Ray; run `pip install 'holdfast[ray]'`, or leave the engine out"
        ) from error
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    return partial(_spread, ray, _connect(ray, address or os.environ.get("RAY_ADDRESS"), workers), workers)


def _connect(ray: Any, address: str | None, workers: int | None) -> _Connection | None:
    """Join a cluster or start one; None where the caller has done so already and will end it."""
    if ray.is_initialized():
        return _joined.get("ray")  # of an engine that is still in use, if any
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None and address != "local":
        try:
            _knock(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"cannot join a Ray cluster at '{address}': {error}. Check the address and that the cluster is up "
                "(`ray status`), or leave the address out to start one on this machine."
            ) from error
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours tells nobody that it runs
        try:
            here = {"_node_ip_address": "127.0.0.1"}  # nobody else is to reach it
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **here, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"cannot start Ray on this machine: {error}. Leave the engine out to run here."
            ) from error
    connection = _joined["ray"] = _Connection()
    weakref.finalize(connection, ray.shutdown)
    return connection


def _knock(address: str) -> None:
    """Raise OSError if nobody listens at host:port; Ray itself would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def _spread(
    ray: Any, connection: _Connection | None, workers: int | None, model: nn.Module, tasks: Iterable[Task]
) -> Iterator[tuple[Task, Found]]:
    """Each task with its result, as they come. `connection` lives as long as this does."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    needs = {"CPU": 1} if device == "cpu" else {"CPU": 1, "GPU": 1}
    do = ray.remote(num_cpus=1, num_gpus=needs.get("GPU", 0), max_retries=RETRIES)(_do)
    # Written out here, where it is the same object each time: a worker that holds this very model keeps it.
    content = ray.cloudpickle.dumps(model)
    digest = hashlib.sha256(content).hexdigest()
    sent, waiting = [ray.put(content)], iter(tasks)
    del content
    under_way: dict[Any, Task] = {}
    try:
        while True:
            for task in islice(waiting, max(0, _room(ray, needs, workers) - len(under_way))):
                under_way[do.remote(_packed(task), digest, sent, _versions(), device)] = task
            if not under_way:
                return
            (done,), _ = ray.wait(list(under_way), num_returns=1)
            task = under_way.pop(done)
            yield task, _result(ray, done, task)
    finally:
        if ray.is_initialized():  # else there is nothing left to cancel, and asking would start a new cluster
            for left in under_way:
                ray.cancel(left)


def _room(ray: Any, needs: dict[str, int], workers: int | None) -> int:
    """How many tasks may be under way now: a cluster may grow and shrink."""
    there = ray.cluster_resources()
    for kind in needs:
        if there.get(kind, 0) < 1:
            raise UnsupportedError(f"the Ray cluster has no {kind}, and each task needs one; add a node that has")
    places = int(min(there[kind] for kind in needs))
    return AHEAD * places if workers is None or workers >= places else workers


def _packed(task: Task) -> Task:
    """The task with tensors of its own on the CPU: a part of a larger tensor would take all of it along."""
    copies = {key: getattr(task, key).detach().to("cpu", copy=True) for key in ("index", "x", "y")}
    return replace(task, **copies)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("holdfast", "torch")}


def _do(task: Task, digest: str, sent: list[Any], versions: dict[str, str], device: str) -> Found:
    """In a worker: does the task."""
    if (here := _versions()) != versions:
        raise UnsupportedError(
            f"a worker has {here}, this machine has {versions}; the answers could differ: install the same"
        )
    torch.set_num_threads(1)  # one core for each worker: more threads would fight for it
    try:
        if digest not in _held:
            import ray

            _held.clear()
            _held[digest] = ray.cloudpickle.loads(ray.get(sent[0])).to(device)
        return work(_held[digest], replace(task, x=task.x.to(device), y=task.y.to(device)))
    except BaseException:
        _held.clear()  # an interrupted attack may leave the model with its gradients switched off
        raise


def _result(ray: Any, done: Any, task: Task) -> Found:
    """What came of the task, or the error that it met, as if it had been met here."""
    try:
        found: Found = ray.get(done)
        return found
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise HoldfastError(
            f"the batch that starts at input {int(task.index[0])} ('{task.stage}' {task.method}) was lost on the Ray "
            f"cluster: {error}. Each try ended with its worker; if memory ran out, give a smaller batch_size."
        ) from error
