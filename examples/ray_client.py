"""Ask a cluster from outside, over Ray's own client port, without HTTP.

Ray and Python must have the cluster's minor versions, and a cluster with token authentication asks
for RAY_AUTH_MODE=token and RAY_AUTH_TOKEN.

    python examples/ray_client.py ray://head-node:10001
"""

import sys

from fmoe_ray import Client

MESSAGES = [{"role": "user", "content": "Tell me a short story."}]


def main(address: str, application: str | None) -> None:
    with Client(address, application=application) as client:
        print(client.models())
        print(client.chat(MESSAGES, max_tokens=40, temperature=0).text)
        for piece in client.chat(MESSAGES, stream=True, max_tokens=40, temperature=0):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "ray://127.0.0.1:10001",
        sys.argv[2] if len(sys.argv) > 2 else None,
    )
