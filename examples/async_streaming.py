"""Stream several answers at the same time with asyncio.

serve run configs/tiny.yaml
python examples/async_streaming.py http://127.0.0.1:8000
"""

import asyncio
import sys

from fmoe_ray import AsyncClient

QUESTIONS = ["What is a cache?", "What is an expert?", "What is a map?"]


async def answer(client: AsyncClient, question: str) -> str:
    text = ""
    messages = [{"role": "user", "content": question}]
    async for piece in await client.chat(messages, stream=True, max_tokens=40, temperature=0):
        text += piece.text
    return text


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(answer(client, question) for question in QUESTIONS))
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {text}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
