"""OpenAI's own package as the client of a real server."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from fmoe_ray.api.stub_server import stub_server
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.stub_runner import StubRunner
from fmoe_ray.errors import ShardLostError

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stub_server() as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_whole_answer_carries_text_reason_and_expert_statistics(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == "abcdefghijklmnopqrstuvwxyz"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens == 9 + 27
    assert answer.usage.model_dump()["fmoe"]["misses"] == 9 + 26


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        temperature=0,
        stop=["xy"],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "abcdefghijklmnopqrstuvw"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 25
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_a_seed_repeats_an_answer_and_its_samples_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, seed=seed, n=2, max_tokens=20
        )
        return [choice.message.content for choice in answer.choices]

    assert texts(1) == texts(1) != texts(7)
    assert texts(1)[0] != texts(1)[1]


def test_several_prompts_give_their_samples_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["v", "x"], n=2, temperature=0, max_tokens=9
    )
    assert [choice.text for choice in answer.choices] == ["wxyz", "wxyz", "yz", "yz"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2


def test_several_samples_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="v", n=2, temperature=0, max_tokens=9, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "wxyz", 1: "wxyz"}


def test_a_token_list_is_a_prompt_and_sixteen_tokens_the_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=list(b"a"), temperature=0)
    assert answer.choices[0].text == "bcdefghijklmnopq"
    assert answer.choices[0].finish_reason == "length"


def test_log_probabilities_come_with_their_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "b"]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["a", "b"]
    completion = client.completions.create(
        model="tiny", prompt="v", temperature=0, max_tokens=3, logprobs=1
    )
    block = completion.choices[0].logprobs
    assert block is not None
    assert (block.tokens, block.text_offset) == (["w", "x", "y"], [0, 1, 2])


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "fmoe_ray"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": 3.0}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ],
)
def test_errors_are_those_of_the_package(
    client: openai.OpenAI, fields: dict[str, object], error: type[openai.APIStatusError]
) -> None:
    body = {"model": "tiny", "messages": HELLO, **fields}
    with pytest.raises(error):
        client.chat.completions.create(**body)  # type: ignore[call-overload]


def test_a_client_that_leaves_frees_its_slot(client: openai.OpenAI, url: str) -> None:
    with client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
    for _ in range(200):
        if httpx.get(f"{url}/health").json()["num_running"] == 0:
            return
    raise AssertionError("the request still runs")


class DyingRunner(StubRunner):
    """Gives up at step `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    async def step(self, plan: StepPlan) -> StepResult:
        await asyncio.sleep(0.02)
        if plan.step >= self._last:
            raise ShardLostError("shard 0 died")
        return await super().step(plan)


def test_a_shard_lost_before_the_first_token_is_503() -> None:
    with stub_server(DyingRunner(last=1)) as url, httpx.Client(base_url=url) as client:
        for stream in (False, True):
            body = {"model": "tiny", "messages": HELLO, "stream": stream}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 503 and "shard 0 died" in response.text
            assert response.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 503


def test_a_shard_lost_after_the_first_token_is_an_error_event() -> None:
    with (
        stub_server(DyingRunner(last=3)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, stream=True
        )
        text = ""
        with pytest.raises(openai.APIError, match="shard 0 died"):
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == "ab"
