"""Errors cross processes, and their tree is the one that is documented."""

import pickle
import re
from collections.abc import Iterator

import pytest

from fmoe_ray import errors
from fmoe_ray.errors import FmoeError, OverloadedError, RequestError


def below(kind: type[FmoeError]) -> Iterator[type[FmoeError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


EVERY = [kind for kind in below(FmoeError) if kind.__module__ == errors.__name__]


def example(kind: type[FmoeError]) -> FmoeError:
    if issubclass(kind, OverloadedError):
        return kind("too much", "n", "busy", retry_after_s=7.5)
    if issubclass(kind, RequestError):
        return kind("refused", "n", "wrong")
    return kind("offload.budget: 3 is too little")


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_in_another_process(kind: type[FmoeError]) -> None:
    error = example(kind)
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_the_documented_tree_names_every_error_below_its_parent() -> None:
    assert errors.__doc__ is not None
    parents: list[tuple[int, str]] = []
    found = {}
    for indent, name in re.findall(r"^([|` -]*)(\w+Error)", errors.__doc__, re.MULTILINE):
        depth = len(indent) // 3
        del parents[depth:]
        found[name] = parents[-1][1] if parents else "Exception"
        parents.append((depth, name))
    assert found == {kind.__name__: kind.__bases__[0].__name__ for kind in EVERY}
