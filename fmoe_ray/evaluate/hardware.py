"""Every constant of the simulated clock, and the formulas that make times of them. Knows no trace.

A simulation counts in units of one layer's compute and takes one number, R = load time of an expert
/ compute time of a layer. Both times follow from a model's sizes and a machine:

    load_s  = expert_bytes / link
    layer_s = (attention + shared + K experts) bytes / memory bandwidth + software per layer

that is, decoding one token reads every active weight once. Weights are bfloat16. KV reads, the
embedding and the output layer are left out.
"""

from dataclasses import dataclass

BYTES_PER_WEIGHT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    name: str
    link_gbps: float
    """Large pinned copies, host to device."""
    memory_gbps: float
    """Data sheet."""
    software_s: float
    """Per layer, on top of reading weights: launches and Python."""
    note: str


RTX_3090 = Machine(
    name="RTX 3090, PCIe 4.0 x16, eager",
    link_gbps=25.0,
    memory_gbps=936.0,
    software_s=2.3e-3,
    note="The paper's GPU, one of its six. 25 of the nominal 32 GB/s. Software: transformers' "
    "eager decode, 56 ms for 24 layers of Qwen1.5-MoE's shape, as measured on an H200 host; the "
    "paper's prototype is built on transformers.",
)
H200 = Machine(
    name="H200, PCIe 5.0 x16, CUDA graph",
    link_gbps=55.0,
    memory_gbps=4800.0,
    software_s=0.2e-3,
    note="Link measured. Software: the same model captured as one CUDA graph, 5.9 ms for 24 layers "
    "of which reading weights is 1.1 ms, as measured.",
)
MACHINES = (RTX_3090, H200)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """From the models' published config.json."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    expert_size: int
    """Intermediate size of an expert."""
    shared_size: int
    """Intermediate size of the shared expert, 0 where there is none."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    @property
    def expert_weights(self) -> int:
        """Gate, up and down projection."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def expert_bytes(self) -> int:
        return self.expert_weights * BYTES_PER_WEIGHT

    @property
    def all_experts_bytes(self) -> int:
        return self.num_layers * self.num_experts * self.expert_bytes

    @property
    def dense_layer_weights(self) -> int:
        """Attention, router and shared expert of one layer."""
        width = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_size
        attention = self.hidden_size * width
        router = self.hidden_size * self.num_experts
        return attention + router + 3 * self.hidden_size * self.shared_size

    @property
    def total_weights(self) -> int:
        embeddings = 2 * self.vocab_size * self.hidden_size
        per_layer = self.dense_layer_weights + self.num_experts * self.expert_weights
        return embeddings + self.num_layers * per_layer

    @property
    def active_weights(self) -> int:
        """Used by one token."""
        embeddings = 2 * self.vocab_size * self.hidden_size
        per_layer = self.dense_layer_weights + self.top_k * self.expert_weights
        return embeddings + self.num_layers * per_layer


MIXTRAL = ModelShape(
    name="Mixtral-8x7B",
    num_layers=32,
    num_experts=8,
    top_k=2,
    hidden_size=4096,
    expert_size=14336,
    shared_size=0,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=32000,
)
QWEN = ModelShape(
    name="Qwen1.5-MoE-A2.7B",
    num_layers=24,
    num_experts=60,
    top_k=4,
    hidden_size=2048,
    expert_size=1408,
    shared_size=5632,
    num_heads=16,
    num_kv_heads=16,
    head_size=128,
    vocab_size=151936,
)
PHI = ModelShape(
    name="Phi-3.5-MoE",
    num_layers=32,
    num_experts=16,
    top_k=2,
    hidden_size=4096,
    expert_size=6400,
    shared_size=0,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=32064,
)
MODELS = (MIXTRAL, QWEN, PHI)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """One model on one machine."""

    model: ModelShape
    machine: Machine

    @property
    def load_s(self) -> float:
        """Of one expert."""
        return self.model.expert_bytes / (self.machine.link_gbps * 1e9)

    @property
    def layer_s(self) -> float:
        """Compute of one layer for one token."""
        active = self.model.dense_layer_weights + self.model.top_k * self.model.expert_weights
        read_s = active * BYTES_PER_WEIGHT / (self.machine.memory_gbps * 1e9)
        return read_s + self.machine.software_s

    @property
    def load_ratio(self) -> float:
        return self.load_s / self.layer_s

    def __str__(self) -> str:
        return f"{self.model.name} on {self.machine.name}"
