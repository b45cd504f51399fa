"""A request of the API, checked and begun, whether it came over HTTP or as a call in a cluster."""

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fmoe_ray.api.jobs import Job, chat_job, completion_job
from fmoe_ray.api.schemas import ChatCompletionRequest, CompletionRequest
from fmoe_ray.api.service import Service
from fmoe_ray.engine.request import Event, Usage
from fmoe_ray.engine.stream import EventStream
from fmoe_ray.errors import InvalidRequestError, ModelNotFoundError


@dataclass(frozen=True, slots=True)
class Call:
    """Who holds it closes the stream, which cancels what still runs."""

    job: Job
    stream: EventStream

    async def whole(self) -> dict[str, Any]:
        """The body of the whole answer. Raises what ended a request early."""
        self.stream.interval_s = math.inf  # nobody looks at the parts
        events: dict[int, Event] = {}
        async for event in self.stream:
            if event.error is not None:
                raise event.error
            whole = events.setdefault(event.index, event)
            if whole is not event:
                whole.absorb(event)
        return self.job.answer.whole([events[index] for index in sorted(events)])

    async def chunks(self, keep_alive_s: float) -> AsyncGenerator[dict[str, Any] | None, None]:
        """The bodies of a stream, None after each `keep_alive_s` without one. Raises what ended a
        request early.
        """
        usages: list[Usage] = []
        while not self.stream.is_over:
            event = await self.stream.next_within(keep_alive_s)
            if event is None:
                if not self.stream.is_over:
                    yield None
                continue
            if event.error is not None:
                raise event.error
            if event.usage is not None:
                usages.append(event.usage)
            yield self.job.answer.chunk(event)
        if self.job.includes_usage:
            yield self.job.answer.usage_chunk(usages)


async def begin(service: Service, body: ChatCompletionRequest | CompletionRequest) -> Call:
    """Raises ModelNotFoundError, InvalidRequestError, OverloadedError, UnavailableError."""
    check_model(service, body.model)
    job = await asyncio.to_thread(_job, service, body)  # long prompts take milliseconds to tokenize
    if len(job.requests) > service.engine.max_requests:
        raise InvalidRequestError(
            f"{len(job.requests)} choices in one request; this server takes at most "
            f"{service.engine.max_requests} (KV slots and engine.max_waiting)",
            "n",
        )
    interval_s = service.settings.stream_interval_ms / 1e3
    return Call(job, service.engine.submit(*job.requests, interval_s=interval_s))


def check_model(service: Service, model: str) -> None:
    if model != service.model_name:
        raise ModelNotFoundError(
            f"model {model!r} is not served here; this server has {service.model_name!r}",
            "model",
            "model_not_found",
        )


def _job(service: Service, body: ChatCompletionRequest | CompletionRequest) -> Job:
    tokenizer = service.engine.tokenizer
    if isinstance(body, ChatCompletionRequest):
        return chat_job(body, tokenizer)
    return completion_job(body, tokenizer)
