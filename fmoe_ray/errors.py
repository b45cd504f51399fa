"""Every exception of the package. A user's mistake names the value and the remedy.

FmoeError
|- ConfigError                a setting, flag or configuration file is wrong
|- ModelError                 a checkpoint cannot be used
|  |- CheckpointNotFoundError     no such folder or hub name
|  |- CheckpointError             incomplete, damaged or not safetensors
|  |- UnsupportedModelError       no offloadable experts in this architecture
|  `- FingerprintError            a host store, map store or trace of another model
|- CapacityError              something does not fit: host, shared or device memory, slots
|- RequestError               a request is refused; carries an HTTP status and the parameter
|  |- InvalidRequestError         400
|  |- AuthenticationError         401
|  |- ModelNotFoundError          404
|  |- DeadlineError               408, the request took too long
|  `- OverloadedError             429, with the seconds to wait
|- EngineError                the engine cannot go on; requests in flight end with it
|  |- StepTimeoutError            a step or transfer made no progress in time
|  `- UnavailableError            503, this replica is being replaced; another attempt may succeed
|     `- ShardLostError           503, an expert shard died
|- TraceError                 a routing trace is malformed
`- StoreError                 an expert-map store cannot be read, written or merged
   `- StoreUnavailableError       the shared store does not answer; replicas go on without it

All are picklable: every argument goes through to `Exception`.
"""


class FmoeError(Exception):
    """Root of all errors that this package raises on purpose."""


class ConfigError(FmoeError):
    """A setting, flag or configuration file is wrong."""


class ModelError(FmoeError):
    """A checkpoint cannot be used."""


class CheckpointNotFoundError(ModelError):
    """There is no checkpoint at the given path or hub name."""


class CheckpointError(ModelError):
    """The checkpoint is incomplete, damaged or in a refused format."""


class UnsupportedModelError(ModelError):
    """The architecture has no experts that can be offloaded."""


class FingerprintError(ModelError):
    """A host store, map store or trace belongs to another model."""


class CapacityError(FmoeError):
    """Something does not fit; the message names what is needed and what is there."""


class RequestError(FmoeError):
    """A request is refused. `status` is its HTTP status."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message


class InvalidRequestError(RequestError):
    """A field of the request is missing, of the wrong type or out of range."""


class AuthenticationError(RequestError):
    """The request carries no key, or one that is not accepted here."""

    status = 401
    kind = "authentication_error"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""

    status = 404


class DeadlineError(RequestError):
    """The request took longer than it may."""

    status = 408
    kind = "timeout_error"


class OverloadedError(RequestError):
    """Too many requests wait already."""

    status = 429
    kind = "rate_limit_error"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, param, code)
        self.args = (message, param, code, retry_after_s)
        self.retry_after_s = retry_after_s


class EngineError(FmoeError):
    """The engine cannot go on; requests in flight end with it."""


class StepTimeoutError(EngineError):
    """A step or a transfer made no progress in time."""


class UnavailableError(EngineError):
    """This replica does not serve any more; another one may."""


class ShardLostError(UnavailableError):
    """An expert shard died; the replica is being replaced."""


class TraceError(FmoeError):
    """A routing trace is malformed."""


class StoreError(FmoeError):
    """An expert-map store cannot be read, written or merged."""


class StoreUnavailableError(StoreError):
    """The map store that all replicas share does not answer now; it may later."""
