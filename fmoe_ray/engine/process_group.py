"""The shards of a replica as processes: gloo on CPUs, NCCL on GPUs, met at an address of rank 0.

Uses torch's process groups without its global default group, so several can live in one process.
"""

import socket
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from fmoe_ray import __version__
from fmoe_ray.engine.seat import Seat
from fmoe_ray.engine.shard_group import ALONE, ShardGroup
from fmoe_ray.errors import ConfigError, EngineError, ShardLostError


def open_group(
    seat: Seat, device: torch.device, *, meeting_timeout_s: float, timeout_s: float
) -> ShardGroup:
    """Waits for the other shards of the replica; a replica of one shard needs no group.

    `timeout_s` is how long a sum may wait for the others. Raises EngineError if they are not all
    there within `meeting_timeout_s`, ConfigError if they run on different devices or versions:
    their numbers would differ in the last bits, and with them their tokens.
    """
    if seat.num_shards == 1:
        return ALONE
    try:
        store = _meet(seat, timedelta(seconds=meeting_timeout_s))
        _check_alike(store, seat, describe_platform(device))
        group = _connect(store, seat, device, timedelta(seconds=timeout_s))
    except (distributed.DistError, RuntimeError) as error:
        raise EngineError(
            f"shard {seat.rank} did not meet all {seat.num_shards} shards at {seat.host}:"
            f"{seat.port} within {meeting_timeout_s:g} s (shards.meeting_timeout_s): {error}; did "
            "one fail to start, or does a firewall between the nodes block their ports?"
        ) from error
    return ProcessGroup(seat, store, group, device)


def describe_platform(device: torch.device) -> str:
    """Equal where equal operations give equal bits."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"CPU {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, fmoe_ray {__version__}"


class ProcessGroup:
    """`engine.shard_group.ShardGroup` over a process group of torch."""

    def __init__(self, seat: Seat, store: Store, group: Any, device: torch.device) -> None:
        """Not called by users: see `open_group`."""
        self._rank = seat.rank
        self._size = seat.num_shards
        self._store = store  # rank 0's is the server, which the others need for as long as they run
        self._group: Any = group
        self._device = device

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def add_up(self, parts: torch.Tensor) -> None:
        # As integers: a sum of floats could turn -0 into +0, and not every backend adds all types.
        is_even = parts.nbytes % 4 == 0
        bits = parts.view(-1).view(torch.int32 if is_even else torch.uint8)
        if self._group is None:
            raise ShardLostError(f"shard {self._rank} has left its group")
        try:
            self._group.allreduce([bits]).wait()
        except RuntimeError as error:
            raise ShardLostError(
                f"shard {self._rank} of {self._size} lost the others: {error}"
            ) from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _meet(seat: Seat, timeout: timedelta) -> Store:
    listener = seat.listener
    return TCPStore(
        seat.host,
        seat.port,
        is_master=seat.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        # The store closes what it is given; the socket object must not close it once more.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _check_alike(store: Store, seat: Seat, platform: str) -> None:
    store.set(f"platform/{seat.rank}", platform)
    first = store.get("platform/0").decode()
    for rank in range(1, seat.num_shards):
        other = store.get(f"platform/{rank}").decode()
        if other != first:
            raise ConfigError(
                f"the shards of a replica must be alike: shard 0 has {first}, shard {rank} has "
                f"{other}; install the same versions and give them the same model of GPU (for "
                "example with an accelerator_type in the cluster file)"
            )


def _connect(store: Store, seat: Seat, device: torch.device, timeout: timedelta) -> Any:
    prefixed = PrefixStore("shards", store)
    if device.type == "cuda":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = distributed.ProcessGroupNCCL(prefixed, seat.rank, seat.num_shards, nccl)
        group.eager_connect_single_device(device)
        return group
    gloo = cast(Any, ProcessGroupGloo)._Options()
    gloo._timeout = timeout
    # gloo would listen on the address of the host's name, which may be 127.0.0.1.
    own_address = _address_towards(seat.host, seat.port)
    gloo._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    return ProcessGroupGloo(prefixed, seat.rank, seat.num_shards, gloo)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the network that reaches `host`. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
