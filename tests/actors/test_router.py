"""The router's choice, its prediction from tokens, and where it finds the prompt."""

from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest

from fmoe_ray.actors.prompt_maps import prompt_of
from fmoe_ray.actors.residency import ResidencyObserver, fit
from fmoe_ray.actors.router import MIN_ADVANTAGE, choose, router_options
from fmoe_ray.config import Settings, parse_settings
from fmoe_ray.maps.named import NamedStore
from fmoe_ray.maps.store import MapStore
from fmoe_ray.maps.token_maps import TokenMaps

L, J = 3, 5


def test_the_clearly_best_fitting_replica_is_chosen_unless_it_is_too_busy() -> None:
    replicas = ["a", "b", "c"]
    assert choose(replicas, [0.2, 0.6, 0.5], [0, 0, 0], 4) == "b"
    assert choose(replicas, [0.2, 0.6, 0.5], [0, 4, 0], 4) == "b"
    assert choose(replicas, [0.2, 0.6, 0.5], [0, 5, 0], 4) == "c"
    assert choose(replicas, [0.5, 0.5 + MIN_ADVANTAGE / 2, 0.1], [0, 0, 0], 4) is None
    assert choose(replicas, [0.2, 0.6, 0.5], [0, 9, 9], 4) is None


def test_fit_is_the_predicted_share_of_what_is_resident() -> None:
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(J), L).astype(np.float32)
    resident = random.random((L, J)) < 0.5
    stats = {"resident": np.packbits(resident).tobytes()}
    assert fit(probs, stats) == pytest.approx(probs[resident].sum() / L)
    assert fit(probs, ResidencyObserver().stats()) == 0


def test_a_prompt_is_predicted_by_the_mean_maps_of_its_tokens() -> None:
    random = np.random.default_rng(1)
    probs = random.dirichlet(np.ones(J), (4, L)).astype(np.float16)
    named = NamedStore(MapStore(num_layers=L, num_experts=J, top_k=2, capacity=4))
    named.store.insert(probs.astype(np.float32), token_ids=np.array([7, 7, 8, -1], np.int32))
    named.refresh()
    tokens = TokenMaps(capacity=2)
    tokens.add(named.read(sorted(named.names)))
    mean = probs[:2].astype(np.float32).mean(0)
    both = (mean + probs[2].astype(np.float32)) / 2
    for prompt, expected in (([7, 99], mean), ([8, 7], both)):
        predicted = tokens.predict(prompt)
        assert predicted is not None
        np.testing.assert_allclose(predicted, expected, atol=1e-3)
    assert tokens.predict([99]) is None
    assert len(tokens) == 2


def test_the_prompt_comes_from_the_body_of_a_call_or_from_the_header() -> None:
    text = "Grüße, 世界"
    assert prompt_of({"prompt": text}) == text
    assert prompt_of({"prompt": [1, 2]}) == [1, 2]
    assert prompt_of({"messages": [{"content": "before"}, {"content": text}]}) == text
    header = (b"x-fmoe-prompt", quote(text).encode())
    assert prompt_of(SimpleNamespace(asgi_scope={"headers": [(b"host", b"x"), header]})) == text
    for nothing in (SimpleNamespace(asgi_scope={"headers": []}), {}, {"prompt": ["a"]}, 3):
        assert not prompt_of(nothing)


def test_routing_by_experts_is_asked_for() -> None:
    assert router_options(Settings()) == {}
    options = router_options(parse_settings({"routing": {"by_experts": True}}))
    config = options["request_router_config"]
    assert config.request_router_kwargs["model_name"] == "tiny"
    assert config.get_request_router_class().__name__ == "ExpertAffinityRouter"
