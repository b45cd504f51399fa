"""From a checked request body to generation requests and the shape of their answer."""

from dataclasses import dataclass

from fmoe_ray.api.answers import Answer, ChatAnswer, CompletionAnswer
from fmoe_ray.api.schemas import ChatCompletionRequest, CompletionRequest
from fmoe_ray.engine.messages import Sampling
from fmoe_ray.engine.request import GenerationRequest
from fmoe_ray.engine.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The requests of one HTTP request, in the order of their choices."""

    requests: list[GenerationRequest]
    answer: Answer
    streams: bool
    includes_usage: bool


def chat_job(body: ChatCompletionRequest, tokenizer: Tokenizer) -> Job:
    """Tokenizes, so it may take a while. Raises InvalidRequestError from the chat template."""
    messages = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.content}
        for m in body.messages
    ]
    return _job(
        body,
        prompts=[tokenizer.encode_chat(messages)],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tokenizer=tokenizer,
        answer_type=ChatAnswer,
    )


def completion_job(body: CompletionRequest, tokenizer: Tokenizer) -> Job:
    """Tokenizes, so it may take a while."""
    return _job(
        body,
        prompts=[tokenizer.encode(p) if isinstance(p, str) else p for p in body.prompt],
        max_tokens=body.max_tokens or _DEFAULT_COMPLETION_TOKENS,
        num_logprobs=body.logprobs,
        tokenizer=tokenizer,
        answer_type=CompletionAnswer,
    )


def _job(
    body: ChatCompletionRequest | CompletionRequest,
    *,
    prompts: list[list[int]],
    max_tokens: int | None,
    num_logprobs: int | None,
    tokenizer: Tokenizer,
    answer_type: type[ChatAnswer] | type[CompletionAnswer],
) -> Job:
    num_samples = body.n or 1
    includes_usage = body.stream_options is not None and body.stream_options.include_usage
    requests = [
        GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=max(0, body.top_k or 0),
                # Each sample of a prompt has its own seed, or all would be the same.
                seed=None if body.seed is None else body.seed + sample,
                num_logprobs=num_logprobs,
            ),
            stop=tuple(body.stop or ()),
            ignore_eos=body.ignore_eos,
        )
        for prompt in prompts
        for sample in range(num_samples)
    ]
    return Job(
        requests=requests,
        answer=answer_type(
            tokenizer, body.model, num_samples=num_samples, includes_usage=includes_usage
        ),
        streams=bool(body.stream),
        includes_usage=includes_usage,
    )
