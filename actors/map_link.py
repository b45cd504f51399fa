"""The way from a shard to its model's map store: the named actor, and calls that end in time."""

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fmoe_ray.actors.map_store import ExpertMapStore, MatchedMap, Segments, StoreInfo
from fmoe_ray.config import Settings
from fmoe_ray.engine.learned_maps import refuse_store_path
from fmoe_ray.engine.map_exchange import MapExchange, Update, Version
from fmoe_ray.engine.runner import LocalRunner
from fmoe_ray.errors import ConfigError, FmoeError, StoreUnavailableError
from fmoe_ray.maps.named import NamedMaps
from fmoe_ray.maps.store_file import StoreHeader

logger = logging.getLogger(__name__)

NAMESPACE = "fmoe"
CALL_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0


class MapStoreActor:
    """Opens the store with the first call: then what is wrong with its file reaches the caller.

    After a crash Ray runs `__init__` again, with the same arguments.
    """

    def __init__(self, header: StoreHeader, path: str | None) -> None:
        self._header = header
        self._path = path

    @cached_property
    def _store(self) -> ExpertMapStore:
        return ExpertMapStore(self._header, self._path, put=ray.put)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self._store, method)(*args, **options)


_RemoteMapStore: Any = ray.remote(num_cpus=0, max_restarts=-1)(MapStoreActor)


def store_name(model_name: str) -> str:
    return f"expert-maps-{model_name}"


class RemoteMapStore:
    """An `ExpertMapStore` in its actor. Every method raises StoreUnavailableError if the actor
    does not answer within `CALL_TIMEOUT_S`, and what the store raises.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def get_or_create(
        cls, model_name: str, header: StoreHeader, path: str | None
    ) -> "RemoteMapStore":
        """The model's store; the first replica creates it, and it outlives all of them."""
        return cls(
            _RemoteMapStore.options(
                name=store_name(model_name),
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                scheduling_strategy=_head_node(),
            ).remote(header, path)
        )

    @classmethod
    def get(cls, model_name: str) -> "RemoteMapStore":
        """Raises StoreUnavailableError if no replica of the model has made one."""
        try:
            return cls(ray.get_actor(store_name(model_name), NAMESPACE))
        except ValueError as error:
            raise StoreUnavailableError(
                f"no map store of model {model_name!r} runs in this cluster"
            ) from error

    def join(self, header: StoreHeader) -> None:
        self._call("join", header)

    def sync(self, reader: str, outgoing: NamedMaps, since: Version) -> Segments:
        segments: Segments = self._call("sync", reader, outgoing, since)
        return segments

    def flush(self) -> None:
        self._call("flush")

    def match(self, **question: Any) -> list[MatchedMap]:
        """As `ExpertMapStore.match`."""
        found: list[MatchedMap] = self._call("match", **question)
        return found

    def info(self) -> StoreInfo:
        info: StoreInfo = self._call("info")
        return info

    def save(self) -> None:
        self._call("save")

    def stop(self) -> None:
        """Saves the maps and ends the actor for good."""
        self.save()
        ray.kill(self._actor, no_restart=True)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return get_within(self._actor.call.remote(method, *args, **options))


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to a cluster for one command. Raises StoreUnavailableError if there is none,
    ConfigError for what is no address.
    """
    _require_listener(address)
    try:
        ray.init(address, log_to_driver=False)
    except ConnectionError as error:
        raise StoreUnavailableError(f"{address}: no cluster answers: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Ray itself would ask an address where nobody listens for ever."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "") or "auto"
    if address == "auto":
        return  # Ray looks for a cluster of this machine
    parts = re.fullmatch(r"(?:ray://)?\[?([^/\[\]]+)\]?:(\d{1,5})", address)
    if parts is None:
        raise ConfigError(f"{address}: no address; write HOST:PORT, ray://HOST:PORT or auto")
    try:
        socket.create_connection((parts[1], int(parts[2])), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: of no port, of no host
        raise StoreUnavailableError(f"{address}: no cluster answers: {error}") from error


class MapLink:
    """An `engine.map_exchange.SharedStore` over Ray."""

    def __init__(self, settings: Settings, header: StoreHeader, reader: str) -> None:
        self._model_name = settings.model.name
        self._path = settings.offload.store_path
        self._header = header
        self._reader = reader

    @cached_property
    def _store(self) -> RemoteMapStore:
        return RemoteMapStore.get_or_create(self._model_name, self._header, self._path)

    def join(self) -> None:
        self._store.join(self._header)

    def sync(self, outgoing: NamedMaps, since: Version) -> Update:
        segments = self._store.sync(self._reader, outgoing, since)
        maps = get_within(segments.refs)
        return Update(version=segments.version, num_taken=segments.num_taken, maps=maps)

    def flush(self) -> None:
        self._store.flush()


def shard_settings(settings: Settings) -> Settings:
    """Where maps are shared their file is the store's, not the shards'."""
    if not settings.offload.share_maps:
        return settings
    offload = settings.offload.model_copy(update={"store_path": None})
    return settings.model_copy(update={"offload": offload})


@asynccontextmanager
async def sharing_maps(settings: Settings, runner: LocalRunner, rank: int) -> AsyncIterator[None]:
    """Exchanges the runner's maps meanwhile, if it has any; the first rank alone tells its own.

    Raises FingerprintError or StoreError where the store is of another model. A store that does
    not answer is no error: the exchange catches up.
    """
    maps = runner.learned_maps
    if maps is None or not settings.offload.share_maps:
        if maps is None:
            refuse_store_path(settings.offload)
        yield
        return
    reader = f"{ray.get_runtime_context().get_actor_id()}/{rank}"
    link = MapLink(settings, maps.header, reader)
    try:
        await asyncio.to_thread(link.join)
    except StoreUnavailableError as error:
        logger.warning("serving without the shared map store for now: %s", error)
    exchange = MapExchange(maps, link, publishes=rank == 0)
    exchange.start()
    try:
        yield
    finally:
        await asyncio.to_thread(exchange.close)


def get_within(refs: Any) -> Any:
    """`ray.get` that raises the store's own errors, and StoreUnavailableError in time."""
    try:
        return ray.get(refs, timeout=CALL_TIMEOUT_S)
    except RayTaskError as error:
        if isinstance(error.cause, FmoeError):
            raise error.cause from error
        raise
    except (RayActorError, GetTimeoutError, ObjectLostError) as error:
        reason = str(error).partition("\n")[0]
        raise StoreUnavailableError(f"the map store does not answer: {reason}") from error


def _head_node() -> NodeAffinitySchedulingStrategy | None:
    """Its file stays reachable there after a restart of the actor."""
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return None
