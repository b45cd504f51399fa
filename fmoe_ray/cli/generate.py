"""`fmoe generate`: the whole engine in one process, without Ray."""

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from fmoe_ray.cli.app import app
from fmoe_ray.config import Budget, OffloadSettings, RoutingSettings, Settings, load_settings
from fmoe_ray.errors import ConfigError

if TYPE_CHECKING:
    from fmoe_ray.api.schemas import ChatCompletionRequest, CompletionRequest
    from fmoe_ray.engine.backend import Backend
    from fmoe_ray.engine.engine import Engine
    from fmoe_ray.engine.request import Event, GenerationRequest, Usage
    from fmoe_ray.engine.runner import Runner
    from fmoe_ray.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="What to answer or continue.")],
    config: Annotated[
        Path | None, typer.Option(help="A Serve file; its first application's args.")
    ] = None,
    expert_budget: Annotated[
        str | None, typer.Option(help="0.25, 25%, 4GiB, a number of experts, or auto.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Prefetching and eviction policy.")] = None,
    max_tokens: Annotated[int, typer.Option(help="At least 1.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 to 2; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Above 0, at most 1.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable; 64 bits.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer one prompt and show what its experts cost."""
    from fmoe_ray.engine.backend import ModelBackend
    from fmoe_ray.engine.engine import Engine

    # Warnings of the libraries must not land in the answer.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = _settings(config, expert_budget, policy)
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    body = _body(prompt, {"model": settings.model.name, **options}, raw=raw)
    backend = ModelBackend()
    backend.check(settings)
    tokenizer = backend.load_tokenizer(settings)
    request = _request(body, tokenizer)
    runner = _load_with_bar(backend, settings)
    engine = Engine(runner, tokenizer, settings.engine)
    whole = asyncio.run(_run(engine, request, show=not as_json))
    assert whole.usage is not None
    stats = _stats(whole.usage)
    if as_json:
        report = {"text": whole.text, "token_ids": whole.token_ids, "stats": stats}
        typer.echo(json.dumps({**report, "finish_reason": whole.finish_reason}))
    else:
        typer.echo()
        typer.echo("  ".join(f"{name} {value}" for name, value in stats.items()), err=True)


def _settings(config: Path | None, expert_budget: str | None, policy: str | None) -> Settings:
    settings = Settings() if config is None else load_settings(config)
    changes: dict[str, Any] = {}
    if expert_budget is not None:
        changes["budget"] = Budget.parse(expert_budget)
    if policy is not None:
        changes["policy"] = policy
    if settings.shards.num_shards != 1:
        raise ConfigError(
            f"{config}: shards.num_shards is {settings.shards.num_shards}; one process computes "
            "with one shard: set it to 1, or use `serve run`"
        )
    offload = settings.offload.model_copy(update=changes)
    if policy is not None:
        offload = _without_unused(offload)
    # Between replicas: there are none here.
    return settings.model_copy(update={"offload": offload, "routing": RoutingSettings()})


def _without_unused(offload: OffloadSettings) -> OffloadSettings:
    """The file's parameters are for the file's policy: another one may have no use for them."""
    from fmoe_ray.policy import unused_settings

    unused = unused_settings(offload)
    if unused:
        logger.warning("policy %s does not use %s", offload.policy, ", ".join(unused))
    given = offload.model_fields_set - set(unused)
    return OffloadSettings(**{name: getattr(offload, name) for name in given})


def _body(
    prompt: str, options: dict[str, Any], *, raw: bool
) -> "ChatCompletionRequest | CompletionRequest":
    """What a server would have read, so that it allows and refuses the same."""
    from fmoe_ray.api.body import parse_body
    from fmoe_ray.api.schemas import ChatCompletionRequest, CompletionRequest

    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes that the terminal's encoding does not have
        raise ConfigError(f"--prompt {prompt!r}: is not UTF-8 text") from error
    if raw:
        return parse_body(json.dumps({"prompt": prompt, **options}).encode(), CompletionRequest)
    messages = [{"role": "user", "content": prompt}]
    return parse_body(json.dumps({"messages": messages, **options}).encode(), ChatCompletionRequest)


def _request(
    body: "ChatCompletionRequest | CompletionRequest", tokenizer: "Tokenizer"
) -> "GenerationRequest":
    from fmoe_ray.api.jobs import chat_job, completion_job
    from fmoe_ray.api.schemas import ChatCompletionRequest

    if isinstance(body, ChatCompletionRequest):
        job = chat_job(body, tokenizer)
    else:
        job = completion_job(body, tokenizer)
    (request,) = job.requests
    return request


def _load_with_bar(backend: "Backend", settings: Settings) -> "Runner":
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"Loading {settings.model.name}", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return backend.load_runner(settings, show)


async def _run(engine: "Engine", request: "GenerationRequest", *, show: bool) -> "Event":
    """The whole answer as one event; raises what ended it early."""
    from fmoe_ray.engine.request import Event

    whole = Event()
    async with engine:
        with engine.submit(request) as events:
            async for event in events:
                if show:
                    print(event.text, end="", flush=True)
                whole.absorb(event)
    if whole.error is not None:
        raise whole.error
    return whole


def _stats(usage: "Usage") -> dict[str, Any]:
    from fmoe_ray.api.usage import usage_body

    body = usage_body([usage], 1)
    counts = {name: body[name] for name in ("prompt_tokens", "completion_tokens")}
    return {**counts, **body["fmoe"]}
