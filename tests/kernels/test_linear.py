import pytest
import torch

from fmoe_ray.kernels.linear import linears


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize("sizes", [[40], [64, 24, 1], [8, 8, 48, 100]])
@pytest.mark.parametrize("is_biased", [False, True])
def test_linears_equal_one_linear_per_weight(
    rows: int, sizes: list[int], is_biased: bool, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 96, dtype=dtype, device=device)
    weights = [torch.randn(n, 96, dtype=dtype, device=device) / 10 for n in sizes]
    biases = [torch.randn(n, dtype=dtype, device=device) for n in sizes] if is_biased else []
    expected = x.double() @ torch.cat(weights).double().T
    if is_biased:
        expected += torch.cat(biases).double()
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(linears(x, weights, biases).double(), expected, rtol=rtol, atol=rtol)
