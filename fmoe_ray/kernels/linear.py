"""Dense linear layers for the few rows of a decode step: one launch for all that share an input.

Memory-bound: a weight is read once, at the width of the memory bus. Up to four weights a launch.
Shapes: M rows, K inputs, N outputs of one weight; the outputs of all weights lie side by side.
"""

import torch
import triton
import triton.language as tl

MAX_ROWS = 64
MAX_WEIGHTS = 4


@triton.jit
def _pick(block, c0, c1, c2, v0, v1, v2, v3):
    picked = v3
    if block < c0:
        picked = v0
    elif block < c1:
        picked = v1
    elif block < c2:
        picked = v2
    return picked


@triton.jit
def _vector(
    x,
    w0,
    w1,
    w2,
    w3,
    b0,
    b1,
    b2,
    b3,
    out,
    n0,
    n1,
    n2,
    n3,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    c0 = tl.cdiv(n0, BLOCK_N)
    c1 = c0 + tl.cdiv(n1, BLOCK_N)
    c2 = c1 + tl.cdiv(n2, BLOCK_N)
    w = _pick(block, c0, c1, c2, w0, w1, w2, w3)
    n = _pick(block, c0, c1, c2, n0, n1, n2, n3)
    first = _pick(block, c0, c1, c2, 0, c0, c1, c2)
    base = _pick(block, c0, c1, c2, 0, n0, n0 + n1, n0 + n1 + n2)
    rows = (block - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < n
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        cols = k + tl.arange(0, BLOCK_K)
        inside = cols < K
        x_k = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(
            w + rows[:, None].to(tl.int64) * K + cols[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        )
        acc += tile.to(tl.float32) * x_k[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        b = _pick(block, c0, c1, c2, b0, b1, b2, b3)
        y += tl.load(b + rows, mask=live, other=0.0).to(tl.float32)
    tl.store(out + base + rows, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _rows(
    x,
    w0,
    w1,
    w2,
    w3,
    b0,
    b1,
    b2,
    b3,
    out,
    n0,
    n1,
    n2,
    n3,
    M,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    c0 = tl.cdiv(n0, BLOCK_N)
    c1 = c0 + tl.cdiv(n1, BLOCK_N)
    c2 = c1 + tl.cdiv(n2, BLOCK_N)
    w = _pick(block, c0, c1, c2, w0, w1, w2, w3)
    n = _pick(block, c0, c1, c2, n0, n1, n2, n3)
    first = _pick(block, c0, c1, c2, 0, c0, c1, c2)
    base = _pick(block, c0, c1, c2, 0, n0, n0 + n1, n0 + n1 + n2)
    cols = (block - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = cols < n
    rows = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x_mk = tl.load(
            x + rows[:, None] * K + ks[None, :],
            mask=(rows < M)[:, None] & (ks < K)[None, :],
            other=0.0,
        )
        w_kn = tl.load(
            w + cols[None, :].to(tl.int64) * K + ks[:, None],
            mask=live[None, :] & (ks < K)[:, None],
            other=0.0,
        )
        acc = tl.dot(x_mk, w_kn, acc, input_precision="ieee")
    if HAS_BIAS:
        b = _pick(block, c0, c1, c2, b0, b1, b2, b3)
        acc += tl.load(b + cols, mask=live, other=0.0).to(tl.float32)[None, :]
    total = n0 + n1 + n2 + n3
    tl.store(
        out + rows[:, None] * total + (base + cols)[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows < M)[:, None] & live[None, :],
    )


def linears(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    """`[x @ w.T + b for each w]` side by side, [M, sum N], in x's dtype; sums in float32.

    x [M, K] with M <= MAX_ROWS; weights [N, K] contiguous, at most MAX_WEIGHTS; biases either one
    a weight or none at all.
    """
    x = x.contiguous()
    rows, k = x.shape
    sizes = [w.shape[0] for w in weights]
    out = torch.empty((rows, sum(sizes)), dtype=x.dtype, device=x.device)
    pad = MAX_WEIGHTS - len(weights)
    ws = [*weights, *[weights[0]] * pad]
    bs = [*biases, *[biases[0]] * pad] if biases else ws
    ns = [*sizes, *[0] * pad]
    # Blocks measured on an H200; they depend on shapes alone.
    if rows == 1:
        block_n, block_k = 2, min(1024, triton.next_power_of_2(k))
        grid = (sum(triton.cdiv(n, block_n) for n in sizes),)
        _vector[grid](x, *ws, *bs, out, *ns, k, bool(biases), block_n, block_k, num_warps=4)
        return out
    block_n, block_k = (16, 256) if max(sizes) <= 4096 else (32, 128)
    block_m = max(16, triton.next_power_of_2(rows))
    block_k = min(block_k, max(16, triton.next_power_of_2(k)))
    grid = (sum(triton.cdiv(n, block_n) for n in sizes),)
    _rows[grid](
        x, *ws, *bs, out, *ns, rows, k, bool(biases), block_m, block_n, block_k, num_warps=4,
        num_stages=4,
    )  # fmt: skip
    return out
