"""How a client of a cluster gets to a deployment's handle, and what its errors mean."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from fmoe_ray.actors.mailbox import RemoteMailbox
from fmoe_ray.errors import ConfigError, FmoeError, OverloadedError, UnavailableError

_DEPLOYMENT = "Replica"


class Connection:
    """The handle behind a target, and over `ray://` the client's mailbox."""

    def __init__(self, target: Any, application: str | None) -> None:
        self._is_ours = False
        if isinstance(target, str):
            self._is_ours = _connect(target)
            with our_errors():
                self.handle: DeploymentHandle = serve.get_app_handle(application or _only_one())
        elif isinstance(target, DeploymentHandle):
            if application is not None:
                raise ConfigError(f"application {application!r}: the handle leads to its own")
            self.handle = target
        else:
            raise ConfigError(
                f"{target!r} is neither an address nor the handle of a Serve deployment"
            )
        self.needs_mailbox = ray.util.client.ray.is_connected()
        self._mailbox: Any = None
        self._streams = count()

    def open_stream(self) -> tuple[Any, int]:
        """A mailbox costs a process: there is one for all streams of a client."""
        if self._mailbox is None:
            self._mailbox = RemoteMailbox.remote()
        return self._mailbox, next(self._streams)

    def close(self) -> None:
        if self._mailbox is not None:
            ray.kill(self._mailbox)
            self._mailbox = None
        if self._is_ours:
            ray.shutdown()


def _connect(address: str) -> bool:
    """False where this process is connected already."""
    if ray.is_initialized():
        if not ray.util.client.ray.is_connected():
            raise ConfigError(
                f"{address}: this process is part of a cluster already; give Client the handle of "
                "the deployment instead"
            )
        return False
    try:
        ray.init(address, namespace="serve", log_to_driver=False)
    except ConnectionError as error:
        raise UnavailableError(
            f"{address}: {error}; a cluster with token authentication answers so where "
            "RAY_AUTH_TOKEN is missing"
        ) from error
    return True


def _only_one() -> str:
    names = [
        name
        for name, application in serve.status().applications.items()
        if _DEPLOYMENT in application.deployments
    ]
    if len(names) != 1:
        raise ConfigError(f"the cluster serves {names or 'no application'}; give application=NAME")
    return str(names[0])


@contextmanager
def our_errors() -> Iterator[None]:
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, FmoeError):
            raise error.cause from error
        raise
    except BackPressureError as error:
        raise OverloadedError(error.message, code="overloaded") from error
    except (RayActorError, DeploymentUnavailableError) as error:
        reason = str(error).partition("\n")[0]
        raise UnavailableError(f"the replica does not answer: {reason}") from error
    except TimeoutError as error:
        raise UnavailableError(f"no answer in time: {error!r}") from error
