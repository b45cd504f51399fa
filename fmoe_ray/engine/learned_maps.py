"""The expert maps that a policy learns: lent to others, kept in `offload.store_path`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fmoe_ray.cache import Offloader
from fmoe_ray.config import OffloadSettings
from fmoe_ray.errors import ConfigError
from fmoe_ray.maps.map_file import MapFile
from fmoe_ray.maps.named import NamedStore
from fmoe_ray.maps.store import MapStore
from fmoe_ray.maps.store_file import StoreHeader

_LOCK_TIMEOUT_S = 60.0


class LearnedMaps:
    """With a path, reads the file when made, before the first step, and writes it when closed."""

    def __init__(
        self, offloader: Offloader, maps: MapStore, path: Path | None, *, is_saved: bool = True
    ) -> None:
        """All shards of a replica read the file; one of them saves it.

        Raises FingerprintError or StoreError for a file of another model or shape, or one that
        is damaged.
        """
        self._offloader = offloader
        self._maps = maps
        self._file = None if path is None else MapFile(path, lock_timeout_s=_LOCK_TIMEOUT_S)
        self._is_saved = is_saved
        if self._file is not None:
            self._file.read_into(maps)
        self.header: StoreHeader = maps.header

    @classmethod
    def open(
        cls,
        settings: OffloadSettings,
        offloader: Offloader,
        *,
        fingerprint: str,
        is_saved: bool = True,
    ) -> "LearnedMaps | None":
        """None for a policy that keeps no maps. Raises ConfigError if it is given a file all the
        same, and what the file's reading raises.
        """
        native = offloader.map_store
        if native is None:
            refuse_store_path(settings)
            return None
        path = None if settings.store_path is None else Path(settings.store_path)
        maps = MapStore.of(native, fingerprint=fingerprint)
        return cls(offloader, maps, path, is_saved=is_saved)

    @contextmanager
    def borrow(self, timeout_s: float) -> Iterator[MapStore]:
        """The maps, for a thread that runs no steps, as `Offloader.borrow_maps` says."""
        with self._offloader.borrow_maps(timeout_s):
            yield self._maps

    def close(self) -> None:
        """After the offloader was closed. What others have saved meanwhile is kept. Raises
        StoreError if the file cannot be written, or is not a store of this model any more.
        """
        if self._file is not None and self._is_saved:
            self._file.save(NamedStore(self._maps))


def refuse_store_path(settings: OffloadSettings) -> None:
    """For a policy that keeps no maps. Raises ConfigError if it is given a file for them."""
    if settings.store_path is not None:
        raise ConfigError(
            f"offload.store_path {settings.store_path}: policy {settings.policy} learns no expert "
            "maps; remove it, or choose a policy that does, such as fmoe"
        )
