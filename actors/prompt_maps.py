"""Predicts a prompt's experts where requests are routed: in a proxy, or beside a handle.

A thread keeps up with the model's map store. Until there are maps and a tokenizer it predicts
nothing.
"""

import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from numpy.typing import NDArray
from ray.exceptions import RayError
from tokenizers import Tokenizer

from fmoe_ray.actors.map_link import RemoteMapStore, get_within
from fmoe_ray.engine.map_exchange import Update, Version
from fmoe_ray.errors import CheckpointError, FmoeError, StoreUnavailableError
from fmoe_ray.maps.named import NamedMaps
from fmoe_ray.maps.token_maps import TokenMaps
from fmoe_ray.models.checkpoint import is_hub_name, resolve

logger = logging.getLogger(__name__)

PROMPT_HEADER = b"x-fmoe-prompt"
_EVERY_S = 2.0
_MAX_CHARS = 4096  # more tells nothing new and costs time on the way of a request


def fetch_maps(model_name: str, reader: str, since: Version) -> Update:
    """What the model's store has that `reader` lacks. Raises StoreUnavailableError where none
    answers, and what the store raises.
    """
    segments = RemoteMapStore.get(model_name).sync(reader, NamedMaps.none(), since)
    return Update(version=segments.version, num_taken=0, maps=get_within(segments.refs))


class PromptMaps:
    """`predict` may be called from any thread."""

    def __init__(
        self,
        model_path: str,
        model_name: str,
        *,
        fetch: Callable[[str, str, Version], Update] = fetch_maps,
        every_s: float = _EVERY_S,
    ) -> None:
        self._model_path = model_path
        self._model_name = model_name
        self._fetch = fetch
        self._every_s = every_s
        self._is_closing = threading.Event()
        self._tokenizer: Tokenizer | None = None
        self._maps = TokenMaps()
        self._lock = threading.Lock()
        self._version = Version()
        self._reader = f"router-{uuid.uuid4().hex[:12]}"
        self._thread = threading.Thread(target=self._run, name="prompt-maps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def predict(self, request: Any) -> NDArray[np.float32] | None:
        """[L, J] for the first argument of a call: a body, or what Serve's proxy sends."""
        tokenizer = self._tokenizer
        prompt = prompt_of(request)
        if tokenizer is None or not prompt:
            return None
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt[:_MAX_CHARS], add_special_tokens=False).ids
        with self._lock:
            return self._maps.predict(prompt)

    def close(self) -> None:
        """The thread ends with its round; does not wait for it."""
        self._is_closing.set()

    def run_once(self) -> None:
        """Reads what is new. Raises as `fetch`."""
        update = self._fetch(self._model_name, self._reader, self._version)
        with self._lock:
            if update.version.life != self._version.life:
                self._maps = TokenMaps()  # it sends everything again, of another model perhaps
            for maps in update.maps:
                self._maps.add(maps)
        self._version = update.version

    def _run(self) -> None:
        try:
            self._tokenizer = _load_tokenizer(self._model_path)
        except (FmoeError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            logger.warning("requests are not routed by experts, no tokenizer.json: %s", error)
            return
        has_warned = False
        while not self._is_closing.is_set():
            try:
                self.run_once()
                has_warned = False
            except StoreUnavailableError:
                pass  # until the first replica has made one, and while it restarts
            except (FmoeError, RayError) as error:
                if not has_warned:
                    logger.warning("requests are not routed by new expert maps: %s", error)
                has_warned = True
            self._is_closing.wait(self._every_s)


def prompt_of(request: Any) -> str | list[int]:
    """Of a chat the last message: what comes before is shared by whole conversations."""
    if isinstance(request, dict):
        if request.get("messages"):
            return str(request["messages"][-1].get("content", ""))
        prompt = request.get("prompt", "")
        is_usable = isinstance(prompt, str) or all(isinstance(item, int) for item in prompt)
        return prompt if is_usable else ""
    scope = getattr(request, "asgi_scope", None)
    for name, value in scope.get("headers", ()) if isinstance(scope, dict) else ():
        if name == PROMPT_HEADER:
            return unquote(value.decode("latin-1"))
    return ""


def _load_tokenizer(path: str) -> Tokenizer:
    if is_hub_name(path):
        file = huggingface_hub.hf_hub_download(path, "tokenizer.json")
    else:
        file = str(resolve(path) / "tokenizer.json")
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file} is missing")
    try:
        return Tokenizer.from_file(file)
    except Exception as error:  # of a damaged file the library raises nothing narrower
        raise CheckpointError(f"{file} cannot be read: {error}") from error
