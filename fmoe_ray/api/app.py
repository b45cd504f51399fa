"""The ASGI application of one replica: OpenAI's endpoints, health, metrics, version."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from fmoe_ray import __version__
from fmoe_ray.api.body import describe_body, read_body
from fmoe_ray.api.calls import begin, check_model
from fmoe_ray.api.errors import add_error_handlers
from fmoe_ray.api.keys import check_key
from fmoe_ray.api.responses import AnswerResponse
from fmoe_ray.api.schemas import ChatCompletionRequest, CompletionRequest
from fmoe_ray.api.service import Service
from fmoe_ray.errors import EngineError

router = APIRouter()
v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="fmoe_ray", version=__version__)
    app.state.service = service
    app.include_router(router)
    app.include_router(v1)
    add_error_handlers(app)
    return app


def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceOf = Annotated[Service, Depends(_service)]


@v1.post("/chat/completions", openapi_extra=describe_body(ChatCompletionRequest))
async def create_chat_completion(request: Request, service: ServiceOf) -> Response:
    return await _answer(service, await read_body(request, ChatCompletionRequest))


@v1.post("/completions", openapi_extra=describe_body(CompletionRequest))
async def create_completion(request: Request, service: ServiceOf) -> Response:
    return await _answer(service, await read_body(request, CompletionRequest))


@v1.get("/models")
async def list_models(service: ServiceOf) -> dict[str, Any]:
    return {"object": "list", "data": [_model_body(service)]}


@v1.get("/models/{model:path}")
async def get_model(model: str, service: ServiceOf) -> dict[str, Any]:
    check_model(service, model)
    return _model_body(service)


@router.get("/health")
async def health(service: ServiceOf) -> JSONResponse:
    """503 when the engine makes no progress, though the process may be alive."""
    body = {"status": "ok", "replica": service.replica, **asdict(service.engine.health())}
    try:
        service.engine.check_health()
    except EngineError as error:
        return JSONResponse({**body, "status": "failed", "failure": str(error)}, 503)
    return JSONResponse(body)


@router.get("/metrics")
async def metrics(service: ServiceOf) -> PlainTextResponse:
    text = service.metrics.render(service.engine.health(), service.engine.info)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


async def _answer(
    service: Service, body: ChatCompletionRequest | CompletionRequest
) -> AnswerResponse:
    return AnswerResponse(await begin(service, body), keep_alive_s=service.settings.keep_alive_s)


def _model_body(service: Service) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "fmoe_ray",
        "fmoe": asdict(info),
    }
