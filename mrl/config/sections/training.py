"""How the Megatron worker is laid out and how it updates."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from mrl.config.sections.lora import LoraSection
from mrl.models.layout import Layout
from mrl.section import Section

_BUCKET_SIZE, _BUCKET_SIZE_OF_A_REPLICA = 40_000_000, 1_000_000


class LayoutSection(Section):
    """Sizes of the parallel axes of training; tp x cp x dp x pp is the world, the number of slots that the
    run takes."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size."""
    vpp: int = Field(default=1, ge=1)
    """Model chunks per pipeline rank (virtual pipeline)."""
    ep: int = Field(default=1, ge=1)
    """Expert parallel size."""
    etp: int = Field(default=1, ge=1)
    """Tensor parallel size inside an expert."""
    dp: int = Field(default=1, ge=1)
    """Data parallel size, which says how many slots the run takes: nothing else does."""
    cp: int = Field(default=1, ge=1)
    """Context parallel size; without Transformer Engine attention holds masks over all pairs of a segment."""

    @model_validator(mode="after")
    def _divides(self) -> "LayoutSection":
        self.sizes()
        return self

    def sizes(self) -> Layout:
        """The layout itself, with the places of its ranks; ConfigError where the sizes do not fit one another."""
        return Layout(**self.model_dump())

    @property
    def world_size(self) -> int:
        """The number of trainer ranks."""
        return self.sizes().world_size


PIECE_BYTES = 512 << 20
"""Of an optimizer's state that rests in the host's memory, on the device at a time; or the state of one parameter, where it has
more."""


class OptimizerSection(Section):
    """Adam with a schedule; lr is in units of the parameter update per step."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule_unit: Literal["updates", "steps"] = "updates"
    """What warmup_steps and decay_steps count: updates (optimizer steps), or steps of the loop (epochs x
    minibatches updates each)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Length of the linear warm-up from 0, in schedule_unit."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    decay_steps: int | None = None
    """When min_lr is reached, in schedule_unit; needed by linear and cosine."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay (not on norms and biases)."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.95
    """Adam's second-moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 means no clipping."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's two moments in memory; bfloat16 halves them and keeps of each master weight only what its
    parameter lacks: 6 bytes a parameter instead of 12. Needs Transformer Engine and training.dtype = bfloat16."""
    offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer's state (by bytes) that rests in the host's memory, also while the trainer runs: an update brings it
    to the device in pieces of 512 MB and takes it back, with the same result to the last bit. Needs float32 moments."""

    def faults(self) -> Iterator[str]:
        if self.offload_fraction > 0 and self.moments_dtype != "float32":
            yield (
                f"optimizer.offload_fraction = {self.offload_fraction} with optimizer.moments_dtype = {self.moments_dtype} is not "
                "implemented; set moments_dtype to float32, or offload_fraction to 0"
            )
        if self.schedule != "constant" and self.decay_steps is None:
            yield f"optimizer.schedule = {self.schedule} needs optimizer.decay_steps"

    def in_updates(self, updates_per_step: int) -> "OptimizerSection":
        """The same schedule counted in updates, where a step of the loop makes `updates_per_step`."""
        if self.schedule_unit == "updates":
            return self
        changes = {
            "schedule_unit": "updates",
            "warmup_steps": self.warmup_steps * updates_per_step,
            "decay_steps": None if self.decay_steps is None else self.decay_steps * updates_per_step,
        }
        return self.model_copy(update=changes)


class TrainingSection(Section):
    """The Megatron side."""

    layout: LayoutSection = LayoutSection()
    """Parallel layout."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Parameter and compute type; master weights and gradient sums are float32."""
    microbatch_tokens: int = Field(default=4096, ge=1)
    """Most tokens in one packed microbatch (a longer sample is a microbatch of its own)."""
    spec: Literal["auto", "transformer_engine", "local"] = "auto"
    """Whose layers are trained: Transformer Engine's with their fusions, or Megatron's and our own (local);
    auto: Transformer Engine's where it is installed, a GPU is there and the model's attention is one that it
    computes (gpt-oss's is not). A checkpoint of one resumes in the other."""
    dispatcher: Literal["auto", "alltoall", "flex"] = "auto"
    """How tokens reach their experts: exchanges (alltoall), or DeepEP's kernels (flex); auto: DeepEP's with
    Transformer Engine's layers in bfloat16, where it is installed and experts are spread."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at one time when log-probs and entropy are computed."""
    recompute: Literal["off", "selective", "full"] = "off"
    """Activation recompute in the transformer blocks; selective: of attention's core, and MLPs or experts whole."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Whether gradients, optimizer state and parameters leave the slot's memory while engines generate; auto:
    on GPUs."""
    overlap_grad_reduce: Literal["auto"] | bool = "auto"
    """Whether gradients are summed over the replicas bucket by bucket while the backward pass of the last microbatch goes
    on, or all after it; auto: where there are replicas (dp, cp, or of experts)."""
    bucket_size: int | None = Field(default=None, ge=1)
    """Parameters in a bucket of gradients, at least, where overlap_grad_reduce has several; null: 40 million, or a million for
    each dp rank where that is more. First pipeline stages alone have several: the others wait for them anyhow."""
    num_threads: int = Field(default=1, ge=1)
    """Intra-op threads of each rank on CPU."""
    collective_seconds: float = Field(default=600.0, gt=0)
    """Longest wait of a rank for the others, in every process group of the trainer."""
    router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Type of the router's matmul and softmax."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss; 0 for RL. It is taken over each microbatch of each rank, so that with it the
    result depends on microbatch_tokens and the layout."""
    optimizer: OptimizerSection = OptimizerSection()
    """The policy's optimizer."""
    lora: LoraSection | None = None
    """Low-rank adapters of the policy, whose weights are then frozen; absent means that all weights are trained. A
    critic is trained whole."""

    def faults(self) -> Iterator[str]:
        if self.lora is not None and "routed_experts" in self.lora.targets and self.layout.etp > 1:
            yield (
                f"training.lora.targets: routed_experts with training.layout.etp = {self.layout.etp} is not implemented; "
                "spread experts with ep instead, or leave routed_experts out"
            )
        if self.bucket_size is not None and self.overlap_grad_reduce is False:
            yield (
                f"training.bucket_size = {self.bucket_size} with training.overlap_grad_reduce = false: gradients are summed in one "
                "bucket then; leave bucket_size out, or set overlap_grad_reduce to auto"
            )

    def summed_bucket(self) -> int | None:
        """Parameters in a bucket of gradients that is summed during the backward pass; None where all are summed after it."""
        layout = self.layout.sizes()
        overlaps = self.overlap_grad_reduce
        if overlaps == "auto":
            overlaps = max(layout.dp * layout.cp, layout.edp) > 1
        default = max(_BUCKET_SIZE, _BUCKET_SIZE_OF_A_REPLICA * layout.dp)  # Megatron's
        return (self.bucket_size or default) if overlaps else None

    def offloads(self, *, gpus: bool) -> bool:
        """Whether the trainer leaves its slot's memory while engines generate, on slots with or without
        GPUs."""
        return self.offload == "always" or (self.offload == "auto" and gpus)
