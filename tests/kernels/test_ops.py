"""What the operators of a step may reach."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fmoe_ray.kernels import ops


class State:
    """Experts that give back what they get, once for each that was chosen."""

    def experts(self, x: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return x[:, None].expand(-1, ids.shape[1], -1).contiguous()


def call() -> torch.Tensor:
    x, empty = torch.ones(2, 3), torch.zeros(0)
    ids, weights = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4)
    layer = torch.tensor(0)
    output: torch.Tensor = torch.ops.fmoe.experts(x, ids, weights, empty, empty, layer)
    return output


def test_a_step_is_of_one_thread() -> None:
    def bind_here() -> torch.Tensor:
        with ops.bind(State()):
            return call()

    with ThreadPoolExecutor(1) as other:
        with ops.bind(State()):
            with ops.bind(State(), decodes=True):
                assert call().shape == (2, 4, 3)
            with pytest.raises(AssertionError, match="in a step of another thread"):
                other.submit(call).result()
            with pytest.raises(AssertionError, match="another thread of this process is in a step"):
                other.submit(bind_here).result()
            assert call().shape == (2, 4, 3)
        assert other.submit(bind_here).result().shape == (2, 4, 3)
    with pytest.raises(AssertionError, match="outside of bind"):
        call()
