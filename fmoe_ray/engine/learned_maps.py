"""The expert maps that a policy learns, kept from one run to the next in `offload.store_path`."""

from pathlib import Path

from fmoe_ray.cache import Offloader
from fmoe_ray.errors import ConfigError
from fmoe_ray.maps.store import MapStore


class LearnedMaps:
    """Reads the file when made, before the first step, and writes it when closed."""

    def __init__(
        self,
        path: str,
        offloader: Offloader,
        *,
        policy: str,
        fingerprint: str,
        is_saved: bool = True,
    ) -> None:
        """All shards of a replica read the file; one of them saves it.

        Raises ConfigError for a policy that keeps no maps; FingerprintError or StoreError for a
        file of another model or shape, or one that is damaged.
        """
        native = offloader.map_store
        if native is None:
            raise ConfigError(
                f"offload.store_path {path}: policy {policy} learns no expert maps; remove it, or "
                "choose a policy that does, such as fmoe"
            )
        self._path = Path(path)
        self._is_saved = is_saved
        self._maps = MapStore.of(native, fingerprint=fingerprint)
        if self._path.exists():
            self._maps.merge(MapStore.load(self._path, like=self._maps))

    def close(self) -> None:
        """After the offloader was closed. Raises StoreError if the file cannot be written."""
        if self._is_saved:
            self._maps.save(self._path)
