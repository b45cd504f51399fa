"""Predicts a prompt's experts where requests are routed: in a proxy, or beside a handle.

A thread keeps up with the model's map store. Until there are maps and a tokenizer it predicts
nothing.
"""

import logging
import threading
import uuid
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from numpy.typing import NDArray
from tokenizers import Tokenizer

from fmoe_ray.actors.map_link import RemoteMapStore, get_within
from fmoe_ray.engine.map_exchange import Version
from fmoe_ray.errors import FmoeError, StoreUnavailableError
from fmoe_ray.maps.named import NamedMaps
from fmoe_ray.maps.token_maps import TokenMaps
from fmoe_ray.models.checkpoint import is_hub_name, resolve

logger = logging.getLogger(__name__)

PROMPT_HEADER = b"x-fmoe-prompt"
_EVERY_S = 2.0
_MAX_CHARS = 4096  # more tells nothing new and costs time on the way of a request


class PromptMaps:
    """`predict` may be called from any thread."""

    def __init__(self, model_path: str, model_name: str) -> None:
        self._model_path = model_path
        self._model_name = model_name
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

    def run_once(self) -> None:
        """Reads what is new. Raises StoreUnavailableError."""
        store = RemoteMapStore.get(self._model_name)
        segments = store.sync(self._reader, NamedMaps.none(), self._version)
        for maps in get_within(segments.refs):
            with self._lock:
                self._maps.add(maps)
        self._version = segments.version

    def _run(self) -> None:
        try:
            self._tokenizer = _load_tokenizer(self._model_path)
        except (FmoeError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            logger.warning("requests are not routed by experts, no tokenizer.json: %s", error)
            return
        pause = threading.Event()
        while True:
            try:
                self.run_once()
            except StoreUnavailableError:
                pass  # until the first replica has made one, and while it restarts
            pause.wait(_EVERY_S)


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
        return Tokenizer.from_file(huggingface_hub.hf_hub_download(path, "tokenizer.json"))
    file = resolve(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing")
    return Tokenizer.from_file(str(file))
