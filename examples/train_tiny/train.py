"""Train the small Mixture-of-Experts dialogue model that ships with fmoe_ray.

Reads dialogues from a JSON lines file, trains a byte-level BPE tokenizer and a Mixtral model on
them, and saves the checkpoint with the lowest validation loss as a Hugging Face folder. Knows
nothing of fmoe_ray itself.

Shape letters: B sequences, T tokens of a sequence, L layers, N = B * T tokens, E experts.
"""

import argparse
import gzip
import json
import math
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

PAD, BOS, END, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [PAD, BOS, END, USER, ASSISTANT]
ROLE_TO_TOKEN = {"user": USER, "assistant": ASSISTANT}
IGNORED_LABEL = -100

# System text opens the next user turn, because the training data has no system role. Any other
# role is read as the user's, so that no conversation is refused.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(prefix='') -%}
{%- for message in messages -%}
  {%- set part = namespace(text='') -%}
  {%- if message['content'] is string -%}
    {%- set part.text = message['content'] -%}
  {%- elif message['content'] is iterable -%}
    {%- for item in message['content'] if item['text'] is string -%}
      {%- set part.text = part.text + item['text'] -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if message['role'] in ['system', 'developer'] -%}
    {%- set ns.prefix = ns.prefix + part.text + ' ' -%}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<|assistant|>' + part.text + '<|end|>' -}}
  {%- else -%}
    {{- '<|user|>' + ns.prefix + part.text + '<|end|>' -}}
    {%- set ns.prefix = '' -%}
  {%- endif -%}
{%- endfor -%}
{%- if ns.prefix -%}
  {{- '<|user|>' + ns.prefix[:-1] + '<|end|>' -}}
{%- endif -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""

SAMPLE_PROMPTS = [
    "I want to find a restaurant in San Jose.",
    "Can you help me find a bus to Los Angeles?",
    "What's the weather going to be like tomorrow?",
    "Can I get a latte with oat milk, please?",
]


class Dialogue(NamedTuple):
    source: str
    turns: tuple[tuple[str, str], ...]  # (role, text)


class Split(NamedTuple):
    train: list[Dialogue]
    validation: list[Dialogue]
    test: list[Dialogue]


class Evaluation(NamedTuple):
    loss: float  # nats per token
    expert_share_LE: torch.Tensor  # of a layer's assignments, each row sums to 1


def clean(text: str) -> str:
    """Undo the escape that some source texts carry and squeeze white space."""
    return " ".join(text.replace("\\r", " ").split())


def load_dialogues(path: Path) -> list[Dialogue]:
    """Return the distinct dialogues of `path`, in file order, leaving out those with an empty turn.

    Raises `ValueError` for a role other than user and assistant.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    kept: dict[tuple[tuple[str, str], ...], Dialogue] = {}
    for record in records:
        turns = tuple((turn["role"], clean(turn["text"])) for turn in record["turns"])
        unknown = {role for role, _ in turns} - ROLE_TO_TOKEN.keys()
        if unknown:
            raise ValueError(f"{path}: unknown role {sorted(unknown)}; use {list(ROLE_TO_TOKEN)}")
        if all(text for _, text in turns):
            kept.setdefault(turns, Dialogue(record["source"], turns))
    print(f"dialogues: {len(records)} read, {len(kept)} distinct and without empty turns")
    return list(kept.values())


def split_dialogues(dialogues: list[Dialogue], num_held_out: int, seed: int) -> Split:
    """Hold out `num_held_out` dialogues for validation and as many for test.

    The same dialogues and seed give the same split on every machine.
    """
    if len(dialogues) <= 2 * num_held_out:
        raise ValueError(f"{len(dialogues)} dialogues cannot hold out twice {num_held_out}")
    shuffled = dialogues.copy()
    random.Random(seed).shuffle(shuffled)
    return Split(
        train=shuffled[2 * num_held_out :],
        validation=shuffled[:num_held_out],
        test=shuffled[num_held_out : 2 * num_held_out],
    )


def render(dialogue: Dialogue) -> str:
    return BOS + "".join(ROLE_TO_TOKEN[role] + text + END for role, text in dialogue.turns)


def train_tokenizer(
    dialogues: list[Dialogue], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (text for dialogue in dialogues for _, text in dialogue.turns),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text yields {tokenizer.get_vocab_size()} tokens; lower --vocab-size to that"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, dialogues: list[Dialogue]) -> list[list[int]]:
    texts = [render(dialogue) for dialogue in dialogues]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def batches(
    dialogue_ids: list[list[int]], batch_size: int, sequence_length: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield [B, T] batches for ever, shuffling and packing anew each epoch.

    A sequence opens with a dialogue, as a conversation does when the model is used; what is cut
    off at its end is left out for that epoch.
    """
    rng = np.random.default_rng(seed)
    sequences: list[list[int]] = []
    sequence: list[int] = []
    while True:
        for index in rng.permutation(len(dialogue_ids)):
            sequence = sequence + dialogue_ids[index]
            if len(sequence) < sequence_length:
                continue
            sequences.append(sequence[:sequence_length])
            sequence = []
            if len(sequences) == batch_size:
                yield torch.tensor(sequences)
                sequences = []


def create_model(
    tokenizer: PreTrainedTokenizerFast, max_length: int, dtype: torch.dtype
) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Not model.to(dtype), which would round the rotary frequencies as well.
    model: MixtralForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def count_assignments(router_logits_LNE: torch.Tensor, num_experts_per_tok: int) -> torch.Tensor:
    """Return how many tokens of each layer chose each expert, as float [L, E]."""
    chosen = router_logits_LNE.topk(num_experts_per_tok, dim=-1).indices
    return F.one_hot(chosen, router_logits_LNE.shape[-1]).sum(dim=(1, 2)).float()


def load_balancing_loss(router_logits_LNE: torch.Tensor, num_experts_per_tok: int) -> torch.Tensor:
    """Return the Switch Transformer's balancing loss, taken per layer and averaged.

    The library's own pools the layers, so that one layer's favourite expert can hide behind
    another's. Perfect balance gives `num_experts_per_tok` in both.
    """
    _, num_tokens, num_experts = router_logits_LNE.shape
    frequency_LE = count_assignments(router_logits_LNE, num_experts_per_tok) / num_tokens
    probability_LE = router_logits_LNE.float().softmax(dim=-1).mean(dim=1)
    return num_experts * (frequency_LE * probability_LE).sum(dim=-1).mean()


def forward(
    model: MixtralForCausalLM, ids_BT: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed next-token loss of `labels_BT` and the router logits [L, N, E]."""
    outputs = model.model(input_ids=ids_BT, use_cache=False, output_router_logits=True)
    logits = model.lm_head(outputs.last_hidden_state[:, :-1])
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels_BT[:, 1:].flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return loss, torch.stack(outputs.router_logits)


@torch.inference_mode()
def evaluate(
    model: MixtralForCausalLM, dialogue_ids: list[list[int]], max_length: int, batch_size: int = 64
) -> Evaluation:
    """Measure the model on each dialogue by itself, as it is used, cut to `max_length` tokens."""
    was_training = model.training
    model.eval()
    device = model.device
    config = model.config
    loss_sum, num_tokens = 0.0, 0
    assignments_LE = torch.zeros(config.num_hidden_layers, config.num_local_experts)
    by_length = sorted((ids[:max_length] for ids in dialogue_ids), key=len)
    for start in range(0, len(by_length), batch_size):
        chunk = by_length[start : start + batch_size]
        rows = [torch.tensor(ids) for ids in chunk]
        labels = torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=IGNORED_LABEL
        )
        # The padding is on the right, where no real token looks: causal attention needs no mask.
        ids = labels.masked_fill(labels == IGNORED_LABEL, config.pad_token_id)
        loss, router_logits_LNE = forward(model, ids.to(device), labels.to(device))
        loss_sum += loss.item()
        num_tokens += sum(len(ids) - 1 for ids in chunk)
        is_real_N = (labels != IGNORED_LABEL).flatten()
        assignments_LE += count_assignments(
            router_logits_LNE.cpu()[:, is_real_N], config.num_experts_per_tok
        )
    model.train(was_training)
    return Evaluation(loss_sum / num_tokens, assignments_LE / assignments_LE.sum(-1, keepdim=True))


def learning_rate_factor(step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


class TrainResult(NamedTuple):
    best_step: int
    validation_loss: float
    master_weights: dict[str, torch.Tensor]  # float32, on the CPU


def train(
    model: MixtralForCausalLM,
    train_ids: list[list[int]],
    validation_ids: list[list[int]],
    args: argparse.Namespace,
) -> TrainResult:
    """Train `model` in place and return the weights of the step with the lowest validation loss.

    Raises `RuntimeError` if no validation loss was finite.

    The model computes with weights in its own dtype while the optimizer holds float32 masters. On a
    GPU that dtype is bfloat16, so every loss seen is one of weights rounded as they will be saved.
    """
    device = model.device
    names, parameters = zip(*model.named_parameters(), strict=True)
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters if m.ndim >= 2], "weight_decay": args.weight_decay},
            {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.steps, args.warmup_steps)
    )
    stream = batches(train_ids, args.batch_size, args.sequence_length, args.seed)
    num_experts_per_tok = model.config.num_experts_per_tok
    best = TrainResult(0, math.inf, {})
    started_s = time.perf_counter()
    model.train()
    for step in range(1, args.steps + 1):
        ids_BT = next(stream).to(device, non_blocking=True)
        loss_sum, router_logits_LNE = forward(model, ids_BT, ids_BT)
        loss = loss_sum / ids_BT[:, 1:].numel()
        balance = load_balancing_loss(router_logits_LNE, num_experts_per_tok)
        (loss + model.config.router_aux_loss_coef * balance).backward()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            schedule.step()
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        if step % args.eval_every and step != args.steps:
            continue
        validation = evaluate(model, validation_ids, args.sequence_length)
        print(
            f"step {step:5d}  train {loss.item():.4f}  balance {balance.item():.3f}  "
            f"validation {validation.loss:.4f}  {time.perf_counter() - started_s:.1f} s",
            flush=True,
        )
        if validation.loss < best.validation_loss:
            weights = {n: m.cpu().clone() for n, m in zip(names, masters, strict=True)}
            best = TrainResult(step, validation.loss, weights)
    if not best.master_weights:
        raise RuntimeError("the validation loss was never finite; lower --learning-rate")
    return best


@torch.inference_mode()
def sample_reply(
    model: MixtralForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    max_new_tokens: int = 64,
) -> str:
    """Return the greedy reply to `prompt` as a first user turn."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    reply: str = tokenizer.decode(output[0, num_prompt_tokens:], skip_special_tokens=True)
    return reply


def count_active_parameters(model: MixtralForCausalLM) -> int:
    """Return how many parameters one token passes through."""
    config = model.config
    num_parameters: int = model.num_parameters()
    num_in_experts: int = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    num_experts: int = config.num_local_experts
    num_idle_experts: int = num_experts - config.num_experts_per_tok
    return num_parameters - num_in_experts * num_idle_experts // num_experts


def save(
    model: MixtralForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    figures: dict[str, str],
) -> None:
    """Write the model, its tokenizer and its card into `folder`.

    `figures` must fill every placeholder of model_card.md; a missing one raises `KeyError`.
    """
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    card = string.Template(Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(card.substitute(figures), encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--dialogues",
        type=Path,
        required=True,
        help='lines of {"source", "turns": [{"role", "text"}]}, as .jsonl or .jsonl.gz',
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a step")
    parser.add_argument(
        "--sequence-length", type=int, default=2048, help="in tokens; also the context length"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument(
        "--held-out", type=int, default=600, help="dialogues to validate on, as many to test on"
    )
    parser.add_argument("--eval-every", type=int, default=50, help="steps between validations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    split = split_dialogues(load_dialogues(args.dialogues), args.held_out, args.seed)
    tokenizer = train_tokenizer(split.train, args.vocab_size, args.sequence_length)
    train_ids, validation_ids, test_ids = (encode(tokenizer, part) for part in split)
    num_train_tokens = sum(map(len, train_ids))
    print(f"split: {[len(part) for part in split]} dialogues, {num_train_tokens:,} training tokens")

    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = create_model(tokenizer, args.sequence_length, dtype).to(device)
    num_parameters, num_active = model.num_parameters(), count_active_parameters(model)
    print(f"model: {num_parameters:,} parameters, {num_active:,} active for a token")
    started_s = time.perf_counter()
    best = train(model, train_ids, validation_ids, args)
    train_s = time.perf_counter() - started_s

    # The test losses are computed in float32 on the CPU, first with the optimizer's weights, then
    # with the bfloat16 weights that are saved.
    reference = create_model(tokenizer, args.sequence_length, torch.float32)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(best.master_weights[name])
    unrounded = evaluate(reference, test_ids, args.sequence_length)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    rounded = evaluate(reference, test_ids, args.sequence_length)
    replies = [(prompt, sample_reply(reference, tokenizer, prompt)) for prompt in SAMPLE_PROMPTS]
    num_seen_tokens = best.best_step * args.batch_size * args.sequence_length
    figures = {
        "num_parameters": f"{num_parameters:,}",
        "num_active": f"{num_active:,}",
        "sequence_length": f"{args.sequence_length:,}",
        "batch_size": str(args.batch_size),
        "learning_rate": f"{args.learning_rate:g}",
        "weight_decay": f"{args.weight_decay:g}",
        "steps": f"{args.steps:,}",
        "best_step": f"{best.best_step:,}",
        "seed": str(args.seed),
        "num_train": f"{len(split.train):,}",
        "num_held_out": f"{args.held_out:,}",
        "num_train_tokens": f"{num_train_tokens:,}",
        "num_epochs": f"{num_seen_tokens / num_train_tokens:.1f}",
        "train_s": f"{train_s:.0f}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        "validation_loss": f"{best.validation_loss:.4f}",
        "test_loss_float32": f"{unrounded.loss:.4f}",
        "test_loss_bfloat16": f"{rounded.loss:.4f}",
        "min_share": f"{rounded.expert_share_LE.min():.1%}",
        "max_share": f"{rounded.expert_share_LE.max():.1%}",
        "samples": "\n".join(f"| {prompt} | {reply} |" for prompt, reply in replies),
    }
    save(reference.to(torch.bfloat16), tokenizer, args.output, figures)
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
