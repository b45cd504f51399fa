"""What a client over `ray://` must see; run by test_client in a process of its own."""

import asyncio
import importlib.util
import sys
import time
from pathlib import Path

import pytest

from fmoe_ray import AsyncClient, Client
from fmoe_ray.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "hi"}]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_client.py"


def check_client(address: str, application: str) -> None:
    with Client(address, application=application) as client:
        assert client.models() == ["tiny"]
        assert client.chat(HELLO, temperature=0).text == ALPHABET
        pieces = list(client.chat(HELLO, stream=True, temperature=0))
        assert "".join(piece.text for piece in pieces) == ALPHABET
        assert pieces[-1].usage is not None
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            client.chat(HELLO, max_tokens=-1)
        with pytest.raises(InvalidRequestError, match="temperature"):
            list(client.chat(HELLO, stream=True, temperature=9))
        began = time.monotonic()
        request = {"ignore_eos": True, "max_tokens": 400, "temperature": 0}
        text = "".join(p.text for p in client.complete("a", stream=True, **request))
        print(f"{len(text) / (time.monotonic() - began):.0f} tokens/s over ray://, 200 possible")
        asyncio.run(check_async_client(address, application))
        abandoned = client.chat(HELLO, stream=True, ignore_eos=True)
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]


async def check_async_client(address: str, application: str) -> None:
    client = AsyncClient(address, application=application)  # shares the connection
    assert (await client.chat(HELLO, temperature=0)).text == ALPHABET
    streams = [await client.chat(HELLO, stream=True, temperature=0) for _ in range(2)]
    for stream in streams:
        assert "".join([piece.text async for piece in stream]) == ALPHABET
    await client.close()


def run_example(address: str, application: str) -> None:
    spec = importlib.util.spec_from_file_location("ray_client", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(address, application)


if __name__ == "__main__":
    check_client(*sys.argv[1:3])
    run_example(*sys.argv[1:3])
