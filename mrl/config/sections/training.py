"""Settings of the Megatron worker: layout, memory and optimizer."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from mrl.config.sections.lora import LoraSection
from mrl.models.layout import Layout
from mrl.section import Section

_BUCKET_SIZE, _BUCKET_SIZE_OF_A_REPLICA = 40_000_000, 1_000_000


class LayoutSection(Section):
    """Sizes of the parallel axes of training; tp x cp x dp x pp is the world, the run's number of slots."""

    tp: int = Field(default=1, ge=1)
    """Set the tensor-parallel size."""
    pp: int = Field(default=1, ge=1)
    """Set the pipeline-parallel size."""
    vpp: int = Field(default=1, ge=1)
    """Set the model chunks per pipeline rank (virtual pipeline)."""
    ep: int = Field(default=1, ge=1)
    """Set the expert-parallel size."""
    etp: int = Field(default=1, ge=1)
    """Set the tensor-parallel size inside an expert."""
    dp: int = Field(default=1, ge=1)
    """Set the data-parallel size, which alone scales the number of slots."""
    cp: int = Field(default=1, ge=1)
    """Set the context-parallel size; without Transformer Engine, masks cover all pairs of a segment."""

    @model_validator(mode="after")
    def _divides(self) -> "LayoutSection":
        self.sizes()
        return self

    def sizes(self) -> Layout:
        """Return the layout with its ranks' positions; raise ConfigError if the sizes do not fit together."""
        return Layout(**self.model_dump())

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.sizes().world_size


PIECE_BYTES = 512 << 20
"""Bytes of off-loaded optimizer state on the device at a time; one parameter's state if that is larger."""


class OptimizerSection(Section):
    """Adam with a learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule_unit: Literal["updates", "steps"] = "updates"
    """Count warmup_steps and decay_steps in updates, or in loop steps of epochs x minibatches updates."""
    warmup_steps: int = Field(default=0, ge=0)
    """Warm up linearly from 0 over this many schedule_unit."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape the learning rate after the warm-up."""
    decay_steps: int | None = None
    """Reach min_lr after this many schedule_unit; required by linear and cosine."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay (not on norms and biases)."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.95
    """Adam's second-moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Clip the global gradient norm to this; 0 does not clip."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Store Adam's moments in this type; bfloat16 halves them and keeps of each master weight only what its
    parameter lacks (6 bytes per parameter instead of 12). Needs Transformer Engine and training.dtype =
    bfloat16."""
    offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Keep this share of the optimizer's state (by bytes) in host memory, also while the trainer runs; an
    update moves it to the device and back in 512 MB pieces, with bitwise the same result. Needs float32
    moments."""

    def faults(self) -> Iterator[str]:
        if self.offload_fraction > 0 and self.moments_dtype != "float32":
            yield (
                f"optimizer.offload_fraction = {self.offload_fraction} with optimizer.moments_dtype = "
                f"{self.moments_dtype} is not implemented; set moments_dtype to float32, or offload_fraction "
                "to 0"
            )
        if self.schedule != "constant" and self.decay_steps is None:
            yield f"optimizer.schedule = {self.schedule} needs optimizer.decay_steps"

    def in_updates(self, updates_per_step: int) -> "OptimizerSection":
        """Return the same schedule counted in updates, with `updates_per_step` updates per loop step."""
        if self.schedule_unit == "updates":
            return self
        changes = {
            "schedule_unit": "updates",
            "warmup_steps": self.warmup_steps * updates_per_step,
            "decay_steps": None if self.decay_steps is None else self.decay_steps * updates_per_step,
        }
        return self.model_copy(update=changes)


MIN_PREFIX_SAVING = 0.1
"""Share prefixes if this share of a batch's tokens is then not computed."""


class TrainingSection(Section):
    """Trainer (Megatron): layout, precision, memory, optimizer."""

    layout: LayoutSection = LayoutSection()
    """Set the parallel layout."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Store parameters and compute in this type; master weights and gradient sums are float32. auto: float32
    on CPU, bfloat16 on GPUs."""
    microbatch_tokens: int = Field(default=4096, ge=1)
    """Pack at most this many tokens into a micro-batch (a longer sample is a micro-batch of its own)."""
    share_prefixes: Literal["auto"] | bool = "auto"
    """Compute the tokens that samples of a group share, such as their prompt, once per micro-batch, if that
    saves 10 % of a batch's tokens; auto: unless cp is above 1, drafts are trained, or the model has delta
    nets."""
    spec: Literal["auto", "transformer_engine", "local"] = "auto"
    """Train Transformer Engine's fused layers, or Megatron's and our own (local); auto takes Transformer
    Engine's if it is installed, on a GPU, and supports the model's attention (not gpt-oss's). A checkpoint of
    one resumes in the other."""
    dispatcher: Literal["auto", "alltoall", "flex"] = "auto"
    """Send tokens to experts by all-to-all, or by DeepEP's kernels (flex); auto takes DeepEP, if installed,
    with Transformer Engine's layers in bfloat16 and experts on several ranks."""
    delta_net_kernels: Literal["auto", "torch", "fla"] = "auto"
    """Compute gated delta nets in torch, or with flash-linear-attention's kernels (fla), in 16 bits on a GPU;
    auto takes these if installed there."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Compute log-probs and entropy over the logits of this many tokens at a time."""
    recompute: Literal["off", "selective", "full"] = "off"
    """Recompute activations: core attention, and MLPs or experts whole (selective), or all blocks (full)."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Off-load gradients, optimizer state and parameters while engines generate; auto: on GPUs."""
    overlap_grad_reduce: Literal["auto"] | bool = "auto"
    """Reduce gradients over replicas bucket by bucket during the backward pass of the last micro-batch,
    instead of after it; auto: if there are replicas (dp, cp, or of experts)."""
    bucket_size: int | None = Field(default=None, ge=1)
    """Put at least this many parameters into a gradient bucket with overlap_grad_reduce; null: 40 million, or
    a million per dp rank if that is more. Only first pipeline stages have several: the others wait for them
    anyway."""
    num_threads: int = Field(default=1, ge=1)
    """Use this many intra-op threads per rank on CPU."""
    collective_seconds: float = Field(default=1800.0, gt=0)
    """Wait at most this many seconds for other ranks in each of the trainer's process groups; on GPUs, ranks
    are minutes apart in a first step, which compiles kernels and pins host memory."""
    router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Compute the router's matmul and softmax in this type."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Weight the load-balancing loss by this; 0 for RL. It is taken per micro-batch and rank, so the result
    then depends on microbatch_tokens and the layout."""
    optimizer: OptimizerSection = OptimizerSection()
    """Configure the policy's optimizer."""
    drafts: Literal["frozen", "trained"] = "frozen"
    """Keep the draft head (multi-token prediction) of model.path as it is for exports, or train it on the
    policy's tokens. That changes nothing in the policy."""
    lora: LoraSection | None = None
    """Train low-rank adapters on frozen weights (the critic is trained whole); null: all weights."""

    def faults(self) -> Iterator[str]:
        if self.share_prefixes is True and self.layout.cp > 1:
            yield (
                f"training.share_prefixes = true with training.layout.cp = {self.layout.cp} is not "
                "implemented; set it to auto"
            )
        if self.lora is not None and "routed_experts" in self.lora.targets and self.layout.etp > 1:
            yield (
                f"training.lora.targets: routed_experts with training.layout.etp = {self.layout.etp} is not "
                "implemented; distribute experts with ep instead, or remove routed_experts"
            )
        for name, value in (("lora", self.lora), ("router_aux_loss", self.router_aux_loss)):
            if self.drafts == "trained" and value:
                yield f"training.drafts = trained with training.{name} is not implemented; set only one"
        if self.drafts == "trained" and self.share_prefixes is True:
            yield (
                "training.drafts = trained with training.share_prefixes = true is not implemented, because "
                "the draft at a prompt's end depends on each sample's first token; set share_prefixes to auto"
            )
        if self.bucket_size is not None and self.overlap_grad_reduce is False:
            yield (
                f"training.bucket_size = {self.bucket_size} with training.overlap_grad_reduce = false has no "
                "effect: gradients are reduced in one bucket; remove bucket_size, or set overlap_grad_reduce "
                "to auto"
            )

    def summed_bucket(self) -> int | None:
        """Return the parameters per gradient bucket reduced in the backward pass; None if after it."""
        layout = self.layout.sizes()
        overlaps = self.overlap_grad_reduce
        if overlaps == "auto":
            overlaps = max(layout.dp * layout.cp, layout.edp) > 1
        default = max(_BUCKET_SIZE, _BUCKET_SIZE_OF_A_REPLICA * layout.dp)  # Megatron's
        return (self.bucket_size or default) if overlaps else None

    def for_teacher(self, *, has_experts: bool) -> "TrainingSection":
        """Return the settings of a frozen model on the same ranks: without adapters and, for a dense one,
        without a distribution of experts."""
        layout = self.layout if has_experts else self.layout.model_copy(update={"ep": 1, "etp": 1})
        return self.model_copy(update={"layout": layout, "lora": None, "drafts": "frozen"})

    def may_share_prefixes(self, *, delta_nets: int) -> bool:
        """Return True if passes over a model with so many layers of delta nets may share prefixes: their
        states do not branch."""
        branches = self.layout.cp == 1 and not delta_nets and self.drafts == "frozen"
        return bool(self.share_prefixes) and branches

    def offloads(self, *, gpus: bool) -> bool:
        """Return True if the trainer leaves its slot's memory while engines generate."""
        return self.offload == "always" or (self.offload == "auto" and gpus)
