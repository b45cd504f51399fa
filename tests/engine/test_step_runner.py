import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmoe_ray.config import parse_settings
from fmoe_ray.engine.messages import Row, RowResult, Sampling, StepPlan
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.errors import ConfigError, StoreError
from fmoe_ray.evaluate.drive import GREEDY, Drive
from fmoe_ray.evaluate.families import generate
from fmoe_ray.evaluate.tiny_models import EXPERTS, LAYERS, TOP_K, VOCAB, save_tiny
from fmoe_ray.kernels import ops
from fmoe_ray.maps.store import MapStore
from fmoe_ray.policy.table import list_policies
from fmoe_ray.trace.format import load_trace

Load = Callable[..., StepRunner]
_random = random.Random(0)
PROMPTS = [[_random.randrange(3, VOCAB) for _ in range(n)] for n in (3, 90, 17, 40, 1, 33)]
NUM_TOKENS = 8
ALL = LAYERS * EXPERTS
BUDGETS = [1.0, 0.5, 0.25, TOP_K]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "phimoe", "deepseek_v3", "gpt_oss"])
def test_greedy_tokens_equal_those_of_generate(
    family: str, load: Load, checkpoint: Callable[[str], Path]
) -> None:
    """In chunks, four at once, with three expert slots, across the sliding window."""
    tokens = Drive(load(family, {"budget": 3}))(PROMPTS, NUM_TOKENS)
    assert tokens == generate(checkpoint(family), PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_tokens_and_logits_are_the_same_bits_for_every_budget(
    family: str, policy: str, load: Load
) -> None:
    """A log-probability is a function of the whole row of logits."""
    sampling = [Sampling(temperature=0.0, num_logprobs=VOCAB)] * len(PROMPTS)
    seen = []
    for budget in BUDGETS:
        drive = Drive(load(family, {"policy": policy, "budget": budget}))
        drive(PROMPTS, NUM_TOKENS, sampling)
        rows = [row for request in drive.rows for row in request]
        seen.append([(row.token, row.logprob, row.top_logprobs) for row in rows])
        misses = sum(result.stats.misses for result in drive.results)
        assert misses > (ALL if budget != 1.0 else 0)
    assert all(other == seen[0] for other in seen)


def test_everything_resident_misses_each_expert_at_most_once(load: Load) -> None:
    drive = Drive(load("mixtral", {"budget": 1.0}))
    drive(PROMPTS, NUM_TOKENS)
    assert sum(result.stats.misses for result in drive.results) <= ALL


def test_a_prompt_that_needs_more_experts_than_slots_is_computed_in_waves(load: Load) -> None:
    runner = load("mixtral", {"budget": TOP_K}, {"max_batch_size": 1})
    drive = Drive(runner, chunk=100)
    tokens = drive([PROMPTS[1]], 1)
    first = drive.results[0].stats
    assert first.misses > runner.info.expert_slots * LAYERS
    assert tokens == Drive(load("mixtral"), chunk=100)([PROMPTS[1]], 1)


def test_a_budget_below_top_k_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match=f"a token needs {TOP_K} at once"):
        load("mixtral", {"budget": TOP_K - 1})


@pytest.mark.parametrize("max_context", [2, 3, 4, 5])
def test_the_shortest_contexts_work(max_context: int, load: Load) -> None:
    runner = load("mixtral", engine={"max_context": max_context})
    assert Drive(runner)([[7]], max_context - 1) == Drive(load("mixtral"))([[7]], max_context - 1)


def test_an_unknown_policy_is_refused_by_name(load: Load) -> None:
    with pytest.raises(ConfigError, match="clairvoyant"):
        load("mixtral", {"policy": "clairvoyant"})


def test_a_context_beyond_the_models_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"max_context 513.*made for 512"):
        load("mixtral", engine={"max_context": 513})


def test_a_decode_step_of_another_runner_in_the_process_changes_nothing(load: Load) -> None:
    class Elsewhere:
        """The other runner's state, which this one must not reach."""

        def experts(self, *_: Any) -> torch.Tensor:
            raise AssertionError

    expected = Drive(load("mixtral"))([PROMPTS[2]], NUM_TOKENS)
    has_begun, may_end = threading.Event(), threading.Event()

    def decode() -> None:
        with ops.bind(Elsewhere(), decodes=True):
            has_begun.set()
            may_end.wait(60)

    with ThreadPoolExecutor(1) as other:
        step = other.submit(decode)
        assert has_begun.wait(5)
        try:
            assert Drive(load("mixtral"))([PROMPTS[2]], NUM_TOKENS) == expected
        finally:
            may_end.set()
        step.result(5)


def test_requests_that_join_and_leave_do_not_change_the_tokens_of_others(load: Load) -> None:
    together = Drive(load("mixtral", {"budget": 0.5}))(PROMPTS, NUM_TOKENS)
    staggered = Drive(load("mixtral", {"budget": 0.5}))(
        PROMPTS, NUM_TOKENS, arrive_at=[0, 5, 1, 9, 3, 12]
    )
    alone = [Drive(load("mixtral"))([prompt], NUM_TOKENS)[0] for prompt in PROMPTS]
    assert together == alone
    assert staggered == alone


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(load: Load) -> None:
    sampling = [Sampling(temperature=0.9, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))]
    together = Drive(load("mixtral"))(PROMPTS, NUM_TOKENS, sampling)
    runner = load("mixtral")
    alone = [
        Drive(runner)([prompt], NUM_TOKENS, [own])[0]
        for prompt, own in zip(PROMPTS, sampling, strict=True)
    ]
    assert together == alone
    others = [Sampling(temperature=0.9, top_p=0.95, seed=100 + seed) for seed in range(6)]
    assert Drive(load("mixtral"))(PROMPTS, NUM_TOKENS, others) != alone


def test_rows_experts_add_up_to_what_they_chose(load: Load) -> None:
    drive = Drive(load("mixtral", {"budget": 0.25}))
    drive(PROMPTS, NUM_TOKENS)
    for request in drive.rows:
        for row in request[-NUM_TOKENS + 1 :]:  # decode: TOP_K experts of each layer
            counts = row.experts
            assert counts.hits + counts.late + counts.misses == LAYERS * TOP_K


def test_a_prompt_chunk_that_is_not_the_last_samples_nothing(load: Load) -> None:
    drive = Drive(load("mixtral"), chunk=32)
    drive([PROMPTS[1]], 2)
    assert [row.token is None for row in drive.rows[0]] == [True, True, False, False]


def test_not_a_number_fails_its_row_and_no_other(load: Load) -> None:
    runner = load("mixtral")
    expected = Drive(runner)([PROMPTS[2]], 1)[0]
    with torch.no_grad():
        runner.model.get_input_embeddings().weight[5] = float("nan")
    bad, good = [7, 5, 9], PROMPTS[2]
    rows = [
        Row(request_id=n, slot=n, start=0, tokens=t, samples=True, sampling=GREEDY)
        for n, t in enumerate((bad, good))
    ]
    result = runner.run(StepPlan(step=0, rows=rows))
    assert result.error is None
    assert result.rows[0].token is None
    assert "NaN" in str(result.rows[0].error)
    assert (result.rows[1].token, result.rows[1].error) == (expected[0], None)


def test_a_failed_step_is_told_and_the_next_one_works(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    runner = load("mixtral", {"budget": 0.25})
    expected = Drive(runner)([PROMPTS[2]], 3)
    handle = runner.model.model.layers[1].register_forward_pre_hook(_fail)
    row = Row(request_id=9, slot=0, start=0, tokens=[4, 5], samples=True, sampling=GREEDY)
    result = runner.run(StepPlan(step=7, rows=[row]))
    assert result.rows == []
    assert "step 7 failed: out of memory, say" in str(result.error)
    assert "step 7 failed" in caplog.text
    handle.remove()
    runner.check_integrity()
    assert Drive(runner)([PROMPTS[2]], 3) == expected


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory, say")


def test_the_event_loop_stays_alive_during_a_step(checkpoint: Callable[[str], Path]) -> None:
    async def serve() -> int:
        runner = StepRunner.load(
            parse_settings({"model": {"path": str(checkpoint("mixtral")), "device": "cpu"}})
        )
        row = Row(request_id=0, slot=0, start=0, tokens=PROMPTS[1] * 4, samples=True)
        step = asyncio.ensure_future(runner.step(StepPlan(step=0, rows=[row])))
        turns = 0
        async with asyncio.timeout(60):
            while not step.done():
                await asyncio.sleep(0)
                turns += 1
        assert (await step).rows[0].token is not None
        await runner.close()
        return turns

    assert asyncio.run(serve()) > 3


def test_the_info_says_what_was_loaded(load: Load) -> None:
    info = load("mixtral", {"budget": "50%"}).info
    assert (info.num_layers, info.num_experts, info.top_k) == (LAYERS, EXPERTS, TOP_K)
    assert info.expert_slots == ALL // 2
    assert (info.num_slots, info.max_context, info.vocab_size) == (4, 200, VOCAB)
    assert (info.device, info.dtype, info.policy) == ("cpu", "float32", "lru")


def test_the_context_is_the_models_own_unless_given(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path, max_position_embeddings=77)
    runner = StepRunner.load(parse_settings({"model": {"path": str(folder), "device": "cpu"}}))
    assert runner.info.max_context == 77
    runner.shutdown()


def test_a_recorded_trace_holds_what_the_model_chose(
    load: Load, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "trace.npz"
    settings = {
        "model": {"path": str(checkpoint("mixtral")), "device": "cpu"},
        "offload": {"policy": "lru", "budget": 0.5, "record_path": str(path)},
        "engine": {"max_batch_size": 4},
    }
    runner = StepRunner.load(parse_settings(settings))
    tokens = Drive(runner)(PROMPTS, NUM_TOKENS)
    unrecorded = Drive(load("mixtral", {"budget": 0.5}))(PROMPTS, NUM_TOKENS)
    assert tokens == unrecorded
    runner.shutdown()
    trace = load_trace(path)
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (LAYERS, EXPERTS, TOP_K)
    assert trace.probs is not None and trace.token_ids is not None and trace.phase is not None
    top = np.argsort(-trace.probs.astype(np.float32), axis=-1)[..., :TOP_K]
    is_same = np.sort(top, axis=-1) == np.sort(trace.expert_ids, axis=-1)
    assert is_same.mean() > 0.99  # float16 may make two probabilities equal
    for (start, length), prompt, answer in zip(trace.sequences(), PROMPTS, tokens, strict=True):
        fed = [*prompt, *answer[:-1]]
        assert trace.token_ids[start : start + length].tolist() == fed
        phases = [0] * len(prompt) + [1] * (NUM_TOKENS - 1)
        assert trace.phase[start : start + length].tolist() == phases


def test_a_recorded_trace_ends_at_its_limit(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "trace.npz"
    sizes = []
    for limit in ({}, {"record_bytes": "5KiB"}):
        settings = {
            "model": {"path": str(checkpoint("mixtral")), "device": "cpu"},
            "offload": {"policy": "lru", "record_path": str(path), **limit},
        }
        runner = StepRunner.load(parse_settings(settings))
        Drive(runner)([PROMPTS[2]], NUM_TOKENS)
        runner.shutdown()
        sizes.append(len(load_trace(path).expert_ids))
    assert sizes[0] == len(PROMPTS[2]) + NUM_TOKENS - 1
    assert len(PROMPTS[2]) <= sizes[1] < sizes[0]


def test_a_limit_of_a_record_that_is_not_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="record_bytes has no effect without record_path"):
        parse_settings({"offload": {"record_bytes": "1GiB"}})


def test_learned_maps_are_kept_in_their_file(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "maps"
    settings = {
        "model": {"path": str(checkpoint("mixtral")), "device": "cpu"},
        "offload": {"policy": "fmoe", "budget": 0.5, "store_path": str(path)},
        "engine": {"max_batch_size": 1},
    }
    sizes = []
    for _ in range(2):
        runner = StepRunner.load(parse_settings(settings))
        Drive(runner)([PROMPTS[2]], NUM_TOKENS)
        runner.shutdown()
        sizes.append(len(MapStore.load(path)))
    assert sizes[0] > 0
    assert sizes[1] == sizes[0] + NUM_TOKENS


def test_a_policy_that_learns_no_maps_refuses_a_file_for_them(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy lru learns no expert maps"):
        load("mixtral", {"policy": "lru", "store_path": str(tmp_path / "maps")})


ALL_LOGITS = [Sampling(temperature=0.0, num_logprobs=VOCAB)] * len(PROMPTS)


@pytest.fixture(scope="module")
def logits_without_offloading(checkpoint: Callable[[str], Path]) -> list[list[RowResult]]:
    model = {"path": str(checkpoint("mixtral")), "device": "cpu"}
    engine = {"max_batch_size": 4, "max_context": 200}
    offload = {"policy": "no-offload", "budget": 1.0}
    runner = StepRunner.load(parse_settings({"model": model, "engine": engine, "offload": offload}))
    drive = Drive(runner)
    drive(PROMPTS, NUM_TOKENS, ALL_LOGITS)
    runner.shutdown()
    return drive.rows


@pytest.mark.parametrize("name", [info.name for info in list_policies()])
def test_every_policy_gives_the_bits_of_a_run_without_offloading(
    name: str, load: Load, logits_without_offloading: list[list[RowResult]]
) -> None:
    """Over a link that is slow enough for prefetches to be under way while layers compute."""
    policy = next(info for info in list_policies() if info.name == name)
    offload: dict[str, object] = {"policy": name, "link_gbps": 0.2}
    offload["budget"] = 1.0 if name == "no-offload" else 0.25
    if "prefetch_distance" in policy.parameters:
        offload["prefetch_distance"] = 1  # the model has three layers
    drive = Drive(load("mixtral", offload))
    drive(PROMPTS, NUM_TOKENS, ALL_LOGITS)
    assert [[_logits(row) for row in rows] for rows in drive.rows] == [
        [_logits(row) for row in rows] for rows in logits_without_offloading
    ]
    num_prefetched = sum(result.stats.bytes_prefetched for result in drive.results)
    if name == "no-offload":
        return  # loads everything beforehand
    assert (num_prefetched > 0) == (policy.predictor != "none")


def _logits(row: RowResult) -> object:
    """A log-probability is a function of the whole row of logits."""
    return row.token, row.logprob, row.top_logprobs


def test_replicas_that_share_a_store_file_add_to_it(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Both began with an empty file; neither takes back what the other has learnt."""
    path = tmp_path / "maps"
    settings = parse_settings(
        {
            "model": {"path": str(checkpoint("mixtral")), "device": "cpu"},
            "offload": {"policy": "fmoe", "store_path": str(path)},
            "engine": {"max_batch_size": 1, "max_context": 200},
        }
    )
    first, second = StepRunner.load(settings), StepRunner.load(settings)
    for runner, prompt in ((first, PROMPTS[0]), (second, PROMPTS[2])):
        Drive(runner)([prompt], NUM_TOKENS)
    sizes = []
    for runner in (first, second):
        runner.shutdown()
        sizes.append(len(MapStore.load(path)))
    assert sizes == [NUM_TOKENS, 2 * NUM_TOKENS]
    StepRunner.load(settings).shutdown()
    assert len(MapStore.load(path)) == 2 * NUM_TOKENS


def test_a_file_that_cannot_be_written_costs_no_other(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.npz"
    (tmp_path / "folder").write_text("in the way")
    settings = parse_settings(
        {
            "model": {"path": str(checkpoint("mixtral")), "device": "cpu"},
            "offload": {
                "policy": "fmoe",
                "store_path": str(tmp_path / "folder" / "maps"),
                "record_path": str(trace),
            },
            "engine": {"max_batch_size": 1, "max_context": 200},
        }
    )
    runner = StepRunner.load(settings)
    Drive(runner)([PROMPTS[0]], 2)
    with pytest.raises(StoreError, match="folder"):
        runner.shutdown()
    assert load_trace(trace).num_tokens == len(PROMPTS[0]) + 1
