import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmoe_ray.models.layout import ALIGNMENT, BlobLayout

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
parameters = st.dictionaries(st.text("abc", min_size=1), st.tuples(dtypes, shapes), min_size=1)


@given(parameters)
def test_parameters_are_aligned_and_never_overlap(
    parameters: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    layout = BlobLayout.of(parameters)
    end = 0
    for field in layout.fields:
        assert field.offset % ALIGNMENT == 0
        assert field.offset >= end
        end = field.offset + field.num_bytes
    assert end <= layout.blob_bytes < end + ALIGNMENT


@given(parameters)
def test_views_write_through_to_the_blob_and_nowhere_else(
    parameters: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    layout = BlobLayout.of(parameters)
    blob = np.zeros(layout.blob_bytes, np.uint8)
    for number, view in enumerate(layout.numpy_views(blob).values(), start=1):
        view.fill_(number)
    for number, (name, view) in enumerate(layout.numpy_views(blob).items(), start=1):
        assert (view.dtype, tuple(view.shape)) == parameters[name]
        assert (view == number).all()
