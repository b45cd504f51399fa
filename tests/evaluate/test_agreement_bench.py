"""Simulator and engine on the same dialogues: what they count is equal; times are compared by the
benchmark alone.
"""

import pytest

from fmoe_ray.config import EngineSettings, Settings
from fmoe_ray.evaluate.agreement_bench import bench_agreement
from fmoe_ray.evaluate.dialogues import load_dialogues, record_routing
from fmoe_ray.evaluate.simulator import TraceSimulator
from fmoe_ray.trace.format import DECODE

SETTINGS = Settings(engine=EngineSettings(num_threads=1))


def test_simulator_and_engine_count_the_same_hits_where_no_prefetch_races() -> None:
    (result,) = bench_agreement(
        SETTINGS, cases=[("lru", 0.25)], load_ms=0.2, seen=1, held_out=2, max_tokens=5
    )
    assert result.simulated_hit_rate == pytest.approx(result.measured_hit_rate)
    assert 0 < result.simulated_hit_rate < 1
    assert result.simulated_tpot_ms > 12 * result.layer_ms


def test_time_of_prompts_and_of_decode_steps_is_told_apart() -> None:
    dialogues = load_dialogues(SETTINGS, seen=3, held_out=0)
    trace = record_routing(SETTINGS, dialogues.seen, max_tokens=5)
    assert trace.num_sequences == 3 and trace.phase is not None
    num_decode = int((trace.phase == DECODE).sum())
    assert num_decode == 3 * 4  # the first token of an answer comes from its prompt's step
    simulation = TraceSimulator(trace).run("lru", trace.sequences(), slots=24, load_ratio=1)
    assert simulation.decode_tokens == num_decode
    assert simulation.num_tokens == 3 + num_decode
    whole = simulation.time_per_decode_token * num_decode + simulation.time_to_first_token * 3
    assert whole == pytest.approx(simulation.time)
    assert simulation.time_to_first_token > simulation.time_per_decode_token
    assert sum(simulation.request_times) == pytest.approx(simulation.time)


def test_a_taught_predictor_predicts_as_one_that_a_simulation_taught() -> None:
    from fmoe_ray.policy import Geometry, make_policy

    dialogues = load_dialogues(SETTINGS, seen=4, held_out=0)
    trace = record_routing(SETTINGS, dialogues.seen, max_tokens=5)
    sequences = trace.sequences()
    assert trace.embeddings is not None
    parts = make_policy(
        "fmoe",
        geometry=Geometry(trace.num_layers, trace.num_experts, trace.top_k),
        num_slots=24,
        embedding_size=trace.embeddings.shape[1],
    )
    assert parts.predictor is not None
    simulator = TraceSimulator(trace)
    simulator.teach(parts.predictor, sequences[:3])
    taught = simulator.run(
        "fmoe",
        sequences[3:],
        slots=24,
        load_ratio=0.5,
        policy_object=parts.policy,
        predictor_object=parts.predictor,
    )
    fresh = simulator.run("fmoe", sequences[3:], slots=24, load_ratio=0.5, learned=sequences[:3])
    assert taught.time == fresh.time and taught.recall == fresh.recall != {}
