"""Ask a server over HTTP, whole and as a stream.

serve run configs/tiny.yaml
python examples/http_client.py http://127.0.0.1:8000
"""

import sys

from fmoe_ray import Client

MESSAGES = [{"role": "user", "content": "Tell me a short story."}]


def main(address: str) -> None:
    with Client(address) as client:
        answer = client.chat(MESSAGES, max_tokens=40, temperature=0)
        print(answer.text)
        experts = answer.usage["fmoe"]
        print(f"experts: {experts['hits']} hits, {experts['misses']} misses")
        for piece in client.chat(MESSAGES, stream=True, max_tokens=40, temperature=0):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
