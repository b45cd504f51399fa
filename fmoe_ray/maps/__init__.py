"""Expert maps: the store of past iterations and the search in it (paper 4.1, 4.2, 4.4)."""

from fmoe_ray.maps.matcher import Match, Matcher
from fmoe_ray.maps.store import EntryRef, MapEntry, MapStore

__all__ = ["EntryRef", "MapEntry", "MapStore", "Match", "Matcher"]
