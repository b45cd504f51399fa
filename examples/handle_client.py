"""Ask from inside the cluster through a Serve handle: no HTTP, and no hop through a proxy.

Run it on a node of the cluster, or as a Ray job:

    python examples/handle_client.py tiny
"""

import sys

import ray
from ray import serve

from fmoe_ray import Client

MESSAGES = [{"role": "user", "content": "Tell me a short story."}]


def main(application: str) -> None:
    with Client(serve.get_app_handle(application)) as client:
        print(client.chat(MESSAGES, max_tokens=40, temperature=0).text)
        for piece in client.chat(MESSAGES, stream=True, max_tokens=40, temperature=0):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    ray.init("auto")
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny")
