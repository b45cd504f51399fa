"""Experts computed where they lie: in slots of one arena, found through the residency table.

Nothing is gathered or stacked. A pair is a token and one of its K experts; its result goes to its
own place of [T, K, H], so that it does not matter when or with which others it was computed.
Shapes: T tokens, K experts a token, P = T * K pairs, J experts of the layer, H hidden, I inner.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fmoe_ray.kernels.routing import sort_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """Where an expert's tensors lie in its blob, in elements, and how they are read.

    Biases are -1 where there are none.
    """

    hidden: int
    inner: int
    gate_up: int
    down: int
    gate_up_bias: int = -1
    down_bias: int = -1
    stride: int
    """Elements from one slot to the next."""
    is_transposed: bool = False
    """Weights are stored [in, out] instead of [out, in]."""
    is_interleaved: bool = False
    """Rows of gate and up alternate instead of lying one after the other."""
    has_gate: bool = True
    activation: str = "silu"
    """A key of ACTIVATIONS."""
    alpha: float = 1.702
    limit: float = 7.0


ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "relu": 4, "clamp_swiglu": 5}


@triton.jit
def _gate(g, u, dtype: tl.constexpr, ACT: tl.constexpr, HAS_GATE: tl.constexpr, alpha, limit):
    """Rounds wherever the library's own operations do: after the linear, the activation, the
    product."""
    g = g.to(dtype).to(tl.float32)
    u = u.to(dtype).to(tl.float32)
    if ACT == 5:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        scaled = (g * alpha).to(dtype).to(tl.float32)
        s = (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
        glu = (g * s).to(dtype).to(tl.float32)
        return (u + 1.0).to(dtype).to(tl.float32) * glu
    if ACT == 0:
        a = g / (1.0 + tl.exp(-g))
    elif ACT == 1:
        a = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    elif ACT == 2:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        a = 0.5 * g * (1.0 + (2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0))
    elif ACT == 3:
        r = tl.maximum(g, 0.0).to(dtype).to(tl.float32)
        a = r * r
    else:
        a = tl.maximum(g, 0.0)
    if HAS_GATE:
        return a.to(dtype).to(tl.float32) * u
    return a


@triton.jit
def _up_vector(
    x,
    ids,
    table,
    arena,
    hidden,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    J,
    K,
    stride,
    off_w,
    off_b,
    stride_n: tl.constexpr,
    stride_k: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    alpha,
    limit,
    ACT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    if expert >= J:
        return
    slot = tl.load(table + expert)
    if slot < 0:
        return
    blob = arena + slot.to(tl.int64) * stride
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < I
    token = pair // K
    if INTERLEAVED:
        # Gate and up rows alternate: one tile of both, taken apart after the sum.
        both = tl.program_id(0) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        acc = tl.zeros([2 * BLOCK_N, BLOCK_K], dtype=tl.float32)
        for k in range(0, H, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            x_k = tl.load(x + token * H + ks, mask=ks < H, other=0.0).to(tl.float32)[None, :]
            tile = tl.load(
                blob + off_w + both[:, None] * stride_n + ks[None, :] * stride_k,
                mask=(both < 2 * I)[:, None] & (ks < H)[None, :],
                other=0.0,
            )
            acc += tile.to(tl.float32) * x_k
        y = tl.sum(acc, axis=1)
        if HAS_BIAS:
            y += tl.load(blob + off_b + both, mask=both < 2 * I, other=0.0).to(tl.float32)
        g, u = tl.split(tl.reshape(y, [BLOCK_N, 2]))
    else:
        acc_g = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        acc_u = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for k in range(0, H, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            mask = live[:, None] & (ks < H)[None, :]
            x_k = tl.load(x + token * H + ks, mask=ks < H, other=0.0).to(tl.float32)[None, :]
            at = blob + off_w + n[:, None] * stride_n + ks[None, :] * stride_k
            acc_g += tl.load(at, mask=mask, other=0.0).to(tl.float32) * x_k
            if HAS_GATE:
                acc_u += tl.load(at + I * stride_n, mask=mask, other=0.0).to(tl.float32) * x_k
        g = tl.sum(acc_g, axis=1)
        u = tl.sum(acc_u, axis=1)
        if HAS_BIAS:
            g += tl.load(blob + off_b + n, mask=live, other=0.0).to(tl.float32)
            if HAS_GATE:
                u += tl.load(blob + off_b + n + I, mask=live, other=0.0).to(tl.float32)
    dtype = hidden.dtype.element_ty
    y = _gate(g, u, dtype, ACT, HAS_GATE, alpha, limit)
    tl.store(hidden + pair * I + n, y.to(dtype), mask=live)


@triton.jit
def _down_vector(
    hidden,
    ids,
    weights,
    table,
    arena,
    out,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    J,
    stride,
    off_w,
    off_b,
    stride_n: tl.constexpr,
    stride_k: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < H
    if expert >= J:
        tl.store(out + pair * H + n, tl.zeros([BLOCK_N], out.dtype.element_ty), mask=live)
        return
    slot = tl.load(table + expert)
    if slot < 0:
        return
    blob = arena + slot.to(tl.int64) * stride
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(0, I, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        h_k = tl.load(hidden + pair * I + ks, mask=ks < I, other=0.0).to(tl.float32)[None, :]
        tile = tl.load(
            blob + off_w + n[:, None] * stride_n + ks[None, :] * stride_k,
            mask=live[:, None] & (ks < I)[None, :],
            other=0.0,
        )
        acc += tile.to(tl.float32) * h_k
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(blob + off_b + n, mask=live, other=0.0).to(tl.float32)
    y = y.to(hidden.dtype.element_ty).to(tl.float32)
    w = tl.load(weights + pair).to(tl.float32)
    tl.store(out + pair * H + n, (y * w).to(out.dtype.element_ty), mask=live)


@triton.jit
def _up_grouped(
    x,
    order,
    starts,
    table,
    arena,
    hidden,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K,
    stride,
    off_w,
    off_b,
    stride_n: tl.constexpr,
    stride_k: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    alpha,
    limit,
    ACT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(1)
    slot = tl.load(table + expert)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if (slot < 0) | (first == last):
        return
    blob = arena + slot.to(tl.int64) * stride
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < I
    both = tl.program_id(0) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
    dtype = hidden.dtype.element_ty
    for m in range(first, last, BLOCK_M):
        at_m = m + tl.arange(0, BLOCK_M)
        pairs = tl.load(order + at_m, mask=at_m < last, other=0)
        tokens = (pairs // K).to(tl.int64)
        acc_g = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        acc_u = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)
        for k in range(0, H, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            x_mk = tl.load(
                x + tokens[:, None] * H + ks[None, :],
                mask=(at_m < last)[:, None] & (ks < H)[None, :],
                other=0.0,
            )
            if INTERLEAVED:
                w = tl.load(
                    blob + off_w + both[None, :] * stride_n + ks[:, None] * stride_k,
                    mask=(ks < H)[:, None] & (both < 2 * I)[None, :],
                    other=0.0,
                )
                acc = tl.dot(x_mk, w, acc, input_precision="ieee")
            else:
                mask = (ks < H)[:, None] & live[None, :]
                at = blob + off_w + n[None, :] * stride_n + ks[:, None] * stride_k
                w_g = tl.load(at, mask=mask, other=0.0)
                acc_g = tl.dot(x_mk, w_g, acc_g, input_precision="ieee")
                if HAS_GATE:
                    w_u = tl.load(at + I * stride_n, mask=mask, other=0.0)
                    acc_u = tl.dot(x_mk, w_u, acc_u, input_precision="ieee")
        if INTERLEAVED:
            if HAS_BIAS:
                b = tl.load(blob + off_b + both, mask=both < 2 * I, other=0.0)
                acc += b.to(tl.float32)[None, :]
            acc_g, acc_u = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        elif HAS_BIAS:
            b = blob + off_b + n
            acc_g += tl.load(b, mask=live, other=0.0).to(tl.float32)[None, :]
            if HAS_GATE:
                acc_u += tl.load(b + I, mask=live, other=0.0).to(tl.float32)[None, :]
        y = _gate(acc_g, acc_u, dtype, ACT, HAS_GATE, alpha, limit)
        tl.store(
            hidden + pairs[:, None].to(tl.int64) * I + n[None, :],
            y.to(dtype),
            mask=(at_m < last)[:, None] & live[None, :],
        )


@triton.jit
def _down_grouped(
    hidden,
    order,
    starts,
    weights,
    table,
    arena,
    out,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    stride,
    off_w,
    off_b,
    stride_n: tl.constexpr,
    stride_k: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(1)
    slot = tl.load(table + expert)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if (slot < 0) | (first == last):
        return
    blob = arena + slot.to(tl.int64) * stride
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < H
    for m in range(first, last, BLOCK_M):
        at_m = m + tl.arange(0, BLOCK_M)
        pairs = tl.load(order + at_m, mask=at_m < last, other=0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, I, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            h_mk = tl.load(
                hidden + pairs[:, None].to(tl.int64) * I + ks[None, :],
                mask=(at_m < last)[:, None] & (ks < I)[None, :],
                other=0.0,
            )
            w_kn = tl.load(
                blob + off_w + n[None, :] * stride_n + ks[:, None] * stride_k,
                mask=(ks < I)[:, None] & live[None, :],
                other=0.0,
            )
            acc = tl.dot(h_mk, w_kn, acc, input_precision="ieee")
        if HAS_BIAS:
            b = tl.load(blob + off_b + n, mask=live, other=0.0).to(tl.float32)
            acc += b[None, :]
        y = acc.to(hidden.dtype.element_ty).to(tl.float32)
        w = tl.load(weights + pairs, mask=at_m < last, other=0.0).to(tl.float32)
        tl.store(
            out + pairs[:, None].to(tl.int64) * H + n[None, :],
            (y * w[:, None]).to(out.dtype.element_ty),
            mask=(at_m < last)[:, None] & live[None, :],
        )


def _strides(layout: ExpertLayout, outputs: int, inputs: int) -> tuple[int, int]:
    return (1, outputs) if layout.is_transposed else (inputs, 1)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    arena: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
) -> None:
    """Writes weight times output of every resident (token, expert) pair into `out` [T, K, H].

    x [T, H]; ids [T, K] integer, ids >= J give zeros; weights [T, K]; table [J] int32, slot or -1;
    arena 1-d in x's dtype. Pairs whose expert is not resident are left as they are: a further
    call after the next wave of experts has arrived fills them. out has the dtype of y * weights.
    """
    tokens, k = ids.shape
    pairs = tokens * k
    num_experts = table.shape[0]
    h, i = layout.hidden, layout.inner
    both = 2 * i if layout.has_gate else i
    up_n, up_k = _strides(layout, both, h)
    down_n, down_k = _strides(layout, h, i)
    act = ACTIVATIONS[layout.activation]
    biased = layout.gate_up_bias >= 0
    inner = torch.empty((pairs, i), dtype=x.dtype, device=x.device)
    # Blocks measured on an H200. They depend on the shapes alone, so that any budget, graph and
    # eager round alike.
    if tokens == 1:
        block_n, block_k = (16, 128) if layout.is_transposed else (2, 1024)
        block_k = min(block_k, triton.next_power_of_2(max(h, i)))
        _up_vector[(triton.cdiv(i, block_n), pairs)](
            x, ids, table, arena, inner, h, i, num_experts, k, layout.stride, layout.gate_up,
            layout.gate_up_bias, up_n, up_k, layout.is_interleaved, layout.alpha, layout.limit,
            act, layout.has_gate, biased, block_n, block_k, num_warps=4,
        )  # fmt: skip
        block_n, block_k = (16, 256) if layout.is_transposed else (2, 512)
        warps = 4 if layout.is_transposed else 2
        _down_vector[(triton.cdiv(h, block_n), pairs)](
            inner, ids, weights, table, arena, out, h, i, num_experts, layout.stride, layout.down,
            layout.down_bias, down_n, down_k, biased, block_n, block_k, num_warps=warps,
        )  # fmt: skip
        return
    order, starts = sort_pairs(ids, num_experts)
    average = pairs / num_experts
    is_small = average <= 16
    block_m = 16 if is_small else 64 if average <= 256 else 128
    block_n, block_k, warps = (32, 128, 4) if is_small else (64, 64, 4 if block_m == 64 else 8)
    _up_grouped[(triton.cdiv(i, block_n), num_experts)](
        x, order, starts, table, arena, inner, h, i, k, layout.stride, layout.gate_up,
        layout.gate_up_bias, up_n, up_k, layout.is_interleaved, layout.alpha, layout.limit, act,
        layout.has_gate, biased, block_m, block_n, block_k, num_warps=warps, num_stages=3,
    )  # fmt: skip
    block_n = 64
    _down_grouped[(triton.cdiv(h, block_n), num_experts)](
        inner, order, starts, weights, table, arena, out, h, i, layout.stride, layout.down,
        layout.down_bias, down_n, down_k, biased, block_m, block_n, block_k, num_warps=warps,
        num_stages=3,
    )  # fmt: skip
