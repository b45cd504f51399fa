"""Attention of a decode step: one new token a row over its own stretch of the KV storage.

A row's keys are cut into parts of fixed size and the parts are joined in order, so the result
depends neither on the other rows nor on how long the bucket is.
Shapes: B rows, Q query heads, G key heads, D key and V value size; KV storage of S slots with M
positions each.
"""

import torch
import triton
import triton.language as tl

PART = 128


@triton.jit
def _parts(
    q,
    k_new,
    v_new,
    k_store,
    v_store,
    slots,
    positions,
    acc_out,
    max_out,
    sum_out,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    M,
    NUM_PARTS,
    PART: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    position = tl.load(positions + row)
    region = (tl.load(slots + row).to(tl.int64) * G + head) * M
    first = part * PART
    PER: tl.constexpr = Q // G
    heads = head * PER + tl.arange(0, BLOCK_Q)
    live_q = tl.arange(0, BLOCK_Q) < PER
    ds = tl.arange(0, BLOCK_D)
    vs = tl.arange(0, BLOCK_V)
    at = first + tl.arange(0, PART)
    visible = at <= position
    if WINDOW > 0:
        visible = visible & (at > position - WINDOW)
    out_at = (row * Q + heads) * NUM_PARTS + part
    if (first > position) | ((WINDOW > 0) & (first + PART <= position - WINDOW + 1)):
        tl.store(max_out + out_at, tl.full([BLOCK_Q], float("-inf"), tl.float32), mask=live_q)
        return
    # The part that holds the new token takes it from the arguments and stores it on the way.
    is_new = at == position
    rows = region + at
    k_at = k_store + rows[:, None] * D + ds[None, :]
    old = (visible & (at < position))[:, None]
    keys = tl.load(k_at, mask=old & (ds < D)[None, :], other=0.0)
    key = tl.load(k_new + (row * G + head) * D + ds, mask=ds < D, other=0.0)
    keys = tl.where(is_new[:, None], key[None, :], keys)
    tl.store(k_at, keys, mask=is_new[:, None] & (ds < D)[None, :])
    v_at = v_store + rows[:, None] * V + vs[None, :]
    values = tl.load(v_at, mask=old & (vs < V)[None, :], other=0.0)
    value = tl.load(v_new + (row * G + head) * V + vs, mask=vs < V, other=0.0)
    values = tl.where(is_new[:, None], value[None, :], values)
    tl.store(v_at, values, mask=is_new[:, None] & (vs < V)[None, :])
    queries = tl.load(
        q + (row * Q + heads)[:, None] * D + ds[None, :],
        mask=live_q[:, None] & (ds < D)[None, :],
        other=0.0,
    )
    s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:
        s = softcap * (2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0)
    s = tl.where(visible[None, :], s, float("-inf"))
    top = tl.max(s, axis=1)
    p = tl.exp(s - top[:, None])
    acc = tl.dot(p.to(values.dtype), values, input_precision="ieee")
    tl.store(max_out + out_at, top, mask=live_q)
    tl.store(sum_out + out_at, tl.sum(p, axis=1), mask=live_q)
    tl.store(
        acc_out + out_at[:, None] * V + vs[None, :],
        acc,
        mask=live_q[:, None] & (vs < V)[None, :],
    )


@triton.jit
def _join(
    acc_in,
    max_in,
    sum_in,
    sinks,
    out,
    Q: tl.constexpr,
    V: tl.constexpr,
    NUM_PARTS,
    HAS_SINKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    vs = tl.arange(0, BLOCK_V)
    at = (row * Q + head) * NUM_PARTS
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32)
        total = total + 1.0
    for part in range(NUM_PARTS):
        m = tl.load(max_in + at + part)
        if m > float("-inf"):
            peak = tl.maximum(top, m)
            old = tl.exp(top - peak)
            new = tl.exp(m - peak)
            total = total * old + tl.load(sum_in + at + part) * new
            acc = acc * old + tl.load(acc_in + (at + part) * V + vs, mask=vs < V, other=0.0) * new
            top = peak
    tl.store(out + (row * Q + head) * V + vs, (acc / total).to(out.dtype.element_ty), mask=vs < V)


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    max_length: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores the new k and v, attends over everything up to them; returns [B, Q, V].

    q [B, Q, D], k [B, G, D], v [B, G, V]; stores contiguous [S, G, M, D or V]; slots int32 [B] and
    positions int32 [B], each below max_length <= M. window 0 and softcap 0 mean none; sinks [Q].
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, num_q, d = q.shape
    g, dv = k.shape[1], v.shape[2]
    parts = triton.cdiv(max_length, PART)
    acc = torch.empty((batch, num_q, parts, dv), dtype=torch.float32, device=q.device)
    stats = torch.empty((2, batch, num_q, parts), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, num_q, dv), dtype=q.dtype, device=q.device)
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (d, dv))
    block_q = max(16, triton.next_power_of_2(num_q // g))
    _parts[(batch, g, parts)](
        q, k, v, k_store, v_store, slots, positions, acc, stats[0], stats[1], scale, softcap,
        window, softcap != 0.0, num_q, g, d, dv, k_store.shape[2], parts, PART, block_d, block_v,
        block_q, num_warps=4,
    )  # fmt: skip
    _join[(batch, num_q)](
        acc, stats[0], stats[1], q if sinks is None else sinks, out, num_q, dv, parts,
        sinks is not None, block_v, num_warps=1,
    )  # fmt: skip
    return out
