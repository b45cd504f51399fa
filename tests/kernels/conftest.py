from importlib.util import find_spec

import pytest
import torch

collect_ignore = []
if find_spec("triton") is None:  # a machine without a GPU need not have it
    collect_ignore = [
        "test_attention.py",
        "test_experts.py",
        "test_linear.py",
        "test_routing.py",
    ]


@pytest.fixture
def device() -> str:
    """The GPU, or Triton's interpreter where `TRITON_INTERPRET=1` is set."""
    import triton

    if torch.cuda.is_available():
        return "cuda"
    if not triton.knobs.runtime.interpret:
        pytest.skip("no GPU: set TRITON_INTERPRET=1 to run the kernels interpreted")
    return "cpu"


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if device == "cpu" and request.param == "bfloat16":
        pytest.skip("Triton's interpreter cannot multiply bfloat16 matrices")
    dtype: torch.dtype = getattr(torch, request.param)
    return dtype
