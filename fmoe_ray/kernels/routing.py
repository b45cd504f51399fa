"""Small kernels around the gate: top-k of a row, and pairs in the order of their experts.

Shapes: T tokens, J experts, K chosen a token, P = T * K pairs.
"""

import torch
import triton
import triton.language as tl

MAX_EXPERTS = 1024


@triton.jit
def _topk(scores, values, indices, J: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    s = tl.load(scores + row * J + cols, mask=cols < J, other=float("-inf")).to(tl.float32)
    taken = cols >= J
    for k in tl.static_range(K):
        # A taken column lies below every other, also below one of minus infinity.
        best = tl.argmax(tl.where(taken, float("-inf"), tl.maximum(s, -3.0e38)), axis=0)
        at = tl.max(tl.where(cols == best, s, float("-inf")), axis=0)
        tl.store(values + row * K + k, at.to(values.dtype.element_ty))
        tl.store(indices + row * K + k, best.to(tl.int64))
        taken = taken | (cols == best)


def topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.topk(scores, k)` over the last dimension of [T, J]; the lower index wins a tie."""
    scores = scores.contiguous()
    rows, j = scores.shape
    values = torch.empty((rows, k), dtype=scores.dtype, device=scores.device)
    indices = torch.empty((rows, k), dtype=torch.int64, device=scores.device)
    _topk[(rows,)](scores, values, indices, j, k, triton.next_power_of_2(j), num_warps=1)
    return values, indices


@triton.jit
def _sort_pairs(ids, order, starts, P, J, BLOCK: tl.constexpr):
    """Counting sort without atomics: rank of a pair = pairs before it, by (expert, number)."""
    block = tl.program_id(0)
    num_pair_blocks = tl.cdiv(P, BLOCK)
    if block < num_pair_blocks:
        mine = block * BLOCK + tl.arange(0, BLOCK)
        e = tl.load(ids + mine, mask=mine < P, other=0)
        rank = tl.zeros([BLOCK], dtype=tl.int32)
        for q in range(0, P, BLOCK):
            others = q + tl.arange(0, BLOCK)
            f = tl.load(ids + others, mask=others < P, other=2147483647)
            before = (f[None, :] < e[:, None]) | (
                (f[None, :] == e[:, None]) & (others[None, :] < mine[:, None])
            )
            rank += tl.sum((before & (others < P)[None, :]).to(tl.int32), axis=1)
        tl.store(order + rank, mine, mask=mine < P)
    else:
        j = (block - num_pair_blocks) * BLOCK + tl.arange(0, BLOCK)
        count = tl.zeros([BLOCK], dtype=tl.int32)
        for q in range(0, P, BLOCK):
            others = q + tl.arange(0, BLOCK)
            f = tl.load(ids + others, mask=others < P, other=2147483647)
            count += tl.sum((f[None, :] < j[:, None]).to(tl.int32), axis=1)
        tl.store(starts + j, count, mask=j <= J)


def sort_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, K] integer -> (order [P], starts [J + 1]), int32.

    `order[starts[j]:starts[j + 1]]` are the pairs of expert j, ascending. Ids >= J lie behind all.
    """
    ids = ids.contiguous()
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    block = 64
    grid = (triton.cdiv(pairs, block) + triton.cdiv(num_experts + 1, block),)
    _sort_pairs[grid](ids, order, starts, pairs, num_experts, block, num_warps=4)
    return order, starts


RULES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "given": 3, "none": 4}


@triton.jit
def _publish(
    ids,
    scores,
    live,
    ids_out,
    chosen_address,
    probs_address,
    J: tl.constexpr,
    K: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0)
    ks = tl.arange(0, BLOCK_K)
    js = tl.arange(0, BLOCK_J)
    is_live = row < tl.load(live)
    chosen = tl.load(ids + row * K + ks, mask=ks < K, other=J).to(tl.int32)
    chosen = tl.where(is_live, chosen, J)
    tl.store(ids_out + row * K + ks, chosen, mask=ks < K)
    chosen_out = chosen_address.to(tl.int64).to(tl.pointer_type(tl.int32))
    probs_out = probs_address.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(chosen_out + row * K + ks, chosen, mask=ks < K)
    if RULE == 4:  # no router decided: what was chosen is all there is to know
        hit = (chosen[:, None] == js[None, :]) & (ks < K)[:, None]
        p = tl.sum(hit.to(tl.float32), axis=0)
    else:
        s = tl.load(scores + row * J + js, mask=js < J, other=float("-inf")).to(tl.float32)
        if RULE == 0:
            p = tl.exp(s - tl.max(s, axis=0))
        elif RULE == 1:
            p = 1.0 / (1.0 + tl.exp(-s))
        elif RULE == 2:
            p = tl.sqrt(tl.maximum(s, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(s))))
        else:
            p = tl.maximum(s, 0.0)
        p = tl.where(js < J, p, 0.0)
    p = p / tl.maximum(tl.sum(p, axis=0), 1e-30)
    tl.store(probs_out + row * J + js, p, mask=js < J)


def publish(
    ids: torch.Tensor,
    scores: torch.Tensor | None,
    rule: str,
    live: torch.Tensor,
    num_experts: int,
    chosen_address: int,
    probs_address: int,
) -> torch.Tensor:
    """Shows the host a gate: choice and distribution of every row go to memory that it reads.

    ids [B, K] integer; scores [B, J], the router's output, or None; rule one of RULES; live [1]
    int32, the rows that count. Returns ids as int32 with J, no expert, in the rows that do not.
    """
    ids = ids.contiguous()
    rows, k = ids.shape
    ids_out = torch.empty((rows, k), dtype=torch.int32, device=ids.device)
    if scores is not None:
        scores = scores.contiguous()
    _publish[(rows,)](
        ids, ids if scores is None else scores, live, ids_out, chosen_address, probs_address,
        num_experts, k, RULES["none" if scores is None else rule],
        triton.next_power_of_2(num_experts), triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip
    return ids_out
