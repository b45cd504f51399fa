"""How events become bodies of the OpenAI API: one class an endpoint."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from fmoe_ray.api.usage import usage_body
from fmoe_ray.engine.request import Event, TokenChoice, Usage
from fmoe_ray.engine.tokenizer import Tokenizer

Body = dict[str, Any]


class Answer(Protocol):
    """Belongs to one HTTP request; remembers what it has said."""

    def chunk(self, event: Event) -> Body: ...

    def usage_chunk(self, usages: Sequence[Usage]) -> Body: ...

    def whole(self, events: Sequence[Event]) -> Body:
        """`events` in the order of the choices, each with all of its text."""
        ...


class _Answer:
    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, tokenizer: Tokenizer, model: str, *, num_samples: int, includes_usage: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._head: Body = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model,
        }
        self._num_samples = num_samples
        self._tail: Body = {"usage": None} if includes_usage else {}

    def chunk(self, event: Event) -> Body:
        return {**self._head, "choices": [self._chunk_choice(event)], **self._tail}

    def usage_chunk(self, usages: Sequence[Usage]) -> Body:
        return {**self._head, "choices": [], "usage": usage_body(usages, self._num_samples)}

    def whole(self, events: Sequence[Event]) -> Body:
        usages = [event.usage for event in events if event.usage is not None]
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._whole_choice(event) for event in events],
            "usage": usage_body(usages, self._num_samples),
        }

    def _chunk_choice(self, event: Event) -> Body:
        raise NotImplementedError

    def _whole_choice(self, event: Event) -> Body:
        raise NotImplementedError

    def _token(self, token: int) -> str:
        return self._tokenizer.decode([token])


class ChatAnswer(_Answer):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, tokenizer: Tokenizer, model: str, *, num_samples: int, includes_usage: bool
    ) -> None:
        super().__init__(tokenizer, model, num_samples=num_samples, includes_usage=includes_usage)
        self._begun: set[int] = set()

    def _chunk_choice(self, event: Event) -> Body:
        delta = {"content": event.text} if event.text else {}
        if event.index not in self._begun:
            self._begun.add(event.index)
            delta = {"role": "assistant", "content": event.text}
        return {
            "index": event.index,
            "delta": delta,
            "logprobs": self._logprobs(event),
            "finish_reason": event.finish_reason,
        }

    def _whole_choice(self, event: Event) -> Body:
        return {
            "index": event.index,
            "message": {"role": "assistant", "content": event.text, "refusal": None},
            "logprobs": self._logprobs(event),
            "finish_reason": event.finish_reason,
        }

    def _logprobs(self, event: Event) -> Body | None:
        if not event.choices:
            return None
        return {"content": [self._entry(choice) for choice in event.choices], "refusal": None}

    def _entry(self, choice: TokenChoice) -> Body:
        top = [self._token_body(item.token, item.logprob) for item in choice.top]
        return {**self._token_body(choice.token, choice.logprob), "top_logprobs": top}

    def _token_body(self, token: int, logprob: float) -> Body:
        text = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionAnswer(_Answer):
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, model: str, *, num_samples: int, includes_usage: bool
    ) -> None:
        super().__init__(tokenizer, model, num_samples=num_samples, includes_usage=includes_usage)
        self._offsets: dict[int, int] = {}

    def _chunk_choice(self, event: Event) -> Body:
        return {
            "index": event.index,
            "text": event.text,
            "logprobs": self._logprobs(event),
            "finish_reason": event.finish_reason,
        }

    def _whole_choice(self, event: Event) -> Body:
        return self._chunk_choice(event)

    def _logprobs(self, event: Event) -> Body | None:
        if not event.choices:
            return None
        tokens = [self._token(choice.token) for choice in event.choices]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets.get(event.index, 0))
            self._offsets[event.index] = offsets[-1] + len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [choice.logprob for choice in event.choices],
            "top_logprobs": [
                {self._token(item.token): item.logprob for item in choice.top}
                for choice in event.choices
            ],
            "text_offset": offsets,
        }
