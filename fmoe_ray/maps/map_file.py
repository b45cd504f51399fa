"""A store's file, which other processes may replace too: what they have saved is not lost."""

from pathlib import Path

from fmoe_ray.errors import StoreError
from fmoe_ray.maps.file_lock import lock_beside
from fmoe_ray.maps.named import NamedMaps, NamedStore
from fmoe_ray.maps.store import MapStore


class MapFile:
    """One process's way to the file. Not thread-safe."""

    def __init__(self, path: Path, *, lock_timeout_s: float) -> None:
        self.path = path
        self._lock_timeout_s = lock_timeout_s
        self._known: set[int] = set()
        self._state: tuple[int, ...] | None = None

    def read_into(self, maps: MapStore) -> None:
        """Merges the file into `maps`, if there is one. Raises FingerprintError or StoreError for
        a file of another model or shape, or one that is damaged.
        """
        state = self._state_now()
        if state is None:
            return
        saved = MapStore.load(self.path, like=maps)
        maps.merge(saved)
        self._known = NamedStore(saved).names
        self._state = state

    def save(self, maps: NamedStore) -> NamedMaps:
        """Stores in `maps` what others have saved since, then replaces the file; returns theirs.

        A map that was read or written here before and is stored no more has been replaced on
        purpose. Raises StoreError if the file cannot be had in time or written, or is damaged, and
        FingerprintError if it is another model's by now.
        """
        with lock_beside(self.path, timeout_s=self._lock_timeout_s):
            theirs = NamedMaps.none()
            if self._state_now() not in (None, self._state):
                saved = NamedStore(MapStore.load(self.path, like=maps.store))
                theirs = maps.insert(saved.read(sorted(saved.names - self._known)))
            maps.store.save(self.path)
            self._state = self._state_now()
        self._known = maps.names
        return theirs

    def _state_now(self) -> tuple[int, ...] | None:
        """Another one for every file that replaces this one; None while there is none."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from error
        return found.st_ino, found.st_mtime_ns, found.st_size
