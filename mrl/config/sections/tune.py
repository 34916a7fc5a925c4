"""Settings of tuning on rows: demonstrations (sft), preferences (the DPO family), or a reward model."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from mrl.config.sections.training import OptimizerSection
from mrl.section import Section, known_name

ObjectiveName = Literal[
    "sft",
    "dpo",
    "robust",
    "ipo",
    "simpo",
    "orpo",
    "kto",
    "hinge",
    "apo_zero",
    "apo_down",
    "exo",
    "custom",
    "reward_model",
]
PAIR_SETTINGS = frozenset({"beta", "length", "sft_weight"})
READS: dict[str, frozenset[str]] = {
    "sft": frozenset({"average"}),
    "dpo": PAIR_SETTINGS | {"smoothing"},
    "robust": PAIR_SETTINGS | {"smoothing"},
    "ipo": PAIR_SETTINGS,
    "simpo": frozenset({"beta", "gamma_over_beta", "smoothing", "sft_weight"}),
    "orpo": frozenset({"beta"}),
    "kto": frozenset({"beta", "desirable_weight", "undesirable_weight"}),
    "hinge": PAIR_SETTINGS,
    "apo_zero": PAIR_SETTINGS,
    "apo_down": PAIR_SETTINGS,
    "exo": PAIR_SETTINGS | {"smoothing"},
    "custom": PAIR_SETTINGS | {"function", "options"},
    "reward_model": frozenset({"smoothing", "center"}),
}
"""Objective -> the settings that it reads; others must keep their default."""

WITHOUT_REFERENCE = frozenset({"sft", "simpo", "orpo", "reward_model"})


class CenterSection(Section):
    """Regularisation that keeps a reward model's scores around 0, which score differences leave free."""

    kind: Literal["pair", "batch_sum", "batch_mean"] = "pair"
    """Square the sum of a pair's scores (mean over pairs), the step's sum of scores, or their mean."""
    weight: float = Field(gt=0)
    """Weight the square by this: about 0.01 for pair, 0.001 for batch_sum."""


class ObjectiveSection(Section):
    """Loss that a tuning step minimises; docs/design/preference.md has the formulas."""

    name: Annotated[ObjectiveName, BeforeValidator(known_name("tune.objective", ObjectiveName))] = "sft"
    """Minimise the cross-entropy of demonstrations (sft), a loss over pairs of chosen and rejected responses,
    or over single labelled responses (kto); reward_model trains a scoring model instead of the policy."""
    average: Literal["tokens", "sequences"] = "tokens"
    """sft: average over the step's trained tokens, or over the rows' own means."""
    beta: float = Field(default=0.1, gt=0)
    """Scale the log-ratio to the reference (orpo: weight of the odds-ratio term)."""
    length: Literal["sum", "mean"] | None = None
    """Sum or average a response's log-ratio over tokens; null sums. Required for ipo (sources differ)."""
    smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assume that this share of pairs has swapped labels."""
    gamma_over_beta: float = Field(default=0.5, ge=0)
    """simpo: require this margin, in units of beta."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight the chosen responses' own loss by this: mean over the step of each response's mean."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """kto: weight responses labelled true by this."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """kto: weight responses labelled false by this."""
    center: CenterSection | None = None
    """reward_model: keep scores around 0 by this term."""
    function: str | None = None
    """custom: package.module:function or file.py:function of pair losses (docs/design/preference.md)."""
    options: dict[str, Any] = {}
    """custom: pass these arguments to the function."""

    def faults(self) -> Iterator[str]:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name for name in defaults if name != "name" and getattr(self, name) != defaults[name]}
        if unread := sorted(changed - READS[self.name]):
            yield f"{unread[0]}: not read by {self.name}, which reads {sorted(READS[self.name])}; remove it"
        if self.name == "ipo" and self.length is None:
            yield "length: required by ipo; set sum (the paper) or mean (its authors' later advice)"
        if self.name == "exo" and not self.smoothing:
            yield "smoothing: exo takes its logarithm; set it above 0, for instance 0.001"
        if (self.name == "custom") != (self.function is not None):
            yield (
                "function: set package.module:function or file.py:function with name = custom, and nothing "
                "otherwise"
            )

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the starting point."""
        return self.name not in WITHOUT_REFERENCE

    @property
    def usual_rate(self) -> float:
        """Default learning rate: what papers and programs use for models of 1B parameters and more."""
        return 1e-5 if self.name == "sft" or self.is_reward_model else 1e-6

    @property
    def takes_pairs(self) -> bool:
        """True if a row is a chosen and a rejected response."""
        return self.name not in ("sft", "kto")

    @property
    def is_reward_model(self) -> bool:
        """True if the trained model gives a score instead of log-probs."""
        return self.name == "reward_model"

    @property
    def couples_scores(self) -> bool:
        """True if a term of the loss needs the scores of the whole step."""
        return self.center is not None and self.center.kind != "pair"


class TuneFile(Section):
    """One file of a mix of rows."""

    path: str
    """Read this file or Hub data set, of any kind that data.train accepts."""
    probability: float | None = Field(default=None, gt=0)
    """Draw this share of the rows, relative to the other files; null is in proportion to their rows."""


class TuneDataSection(Section):
    """Rows to tune on."""

    train: str | tuple[TuneFile, ...]
    """Train on this file, or mix of files."""
    validation: str | None = None
    """Measure on these rows, without training on them."""
    overlong: Literal["filter", "refuse"] = "refuse"
    """Leave out and count rows (whole pairs) longer than model.max_length, or end the run; never cut."""
    turns: Literal["all", "last"] = "all"
    """sft: train on every assistant message of a conversation, or only on the last."""
    chat_template_kwargs: dict[str, Any] = {}
    """Pass these arguments to the chat template."""

    @field_validator("train")
    @classmethod
    def _all_or_none(cls, value: Any) -> Any:
        given = [] if isinstance(value, str) else [file.probability is not None for file in value]
        if not value or (any(given) and not all(given)):
            raise ValueError("names no file, or only some files have a probability; give one to all or none")
        return value

    def files(self) -> tuple[TuneFile, ...]:
        """Return the training files; a plain path is one file."""
        return (TuneFile(path=self.train),) if isinstance(self.train, str) else self.train


class TuneOptimizerSection(OptimizerSection):
    """Optimizer of `mrl tune`."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate; if not given, 1e-5 for sft and reward models, 1e-6 for dpo and its relatives."""


class TuneSection(Section):
    """Tuning without engines on the same Megatron worker: `mrl tune`."""

    objective: ObjectiveSection = ObjectiveSection()
    """Choose the loss."""
    data: TuneDataSection
    """Train on demonstrations or preferences."""
    output: str
    """Write the tuned model to this new Hugging Face folder."""
    steps: int | None = Field(default=None, ge=1)
    """Make this many optimizer steps on rows drawn with replacement."""
    epochs: int | None = Field(default=None, ge=1)
    """Pass this often over all rows instead, each time in a new order; rows that do not fill a last step join
    the next one. One epoch if neither steps nor epochs is given."""
    batch_rows: int = Field(default=256, ge=1)
    """Train on this many rows per step; a pair is one row."""
    optimizer: TuneOptimizerSection = TuneOptimizerSection()
    """Configure the optimizer of `mrl tune`, which ignores `training.optimizer`."""
    validate_every: int = Field(default=0, ge=0)
    """Validate every this many steps; with data.validation, also before the first and after the last step."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Save a checkpoint to resume from every this many steps; 0 saves only when the run is asked to stop."""
    keep_best: str | None = None
    """Export the weights with the best value of this validation metric (val/preference/accuracy, for
    instance) instead of the last; the smallest is best for val/loss, the largest for others."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _rate_of_the_objective(cls, value: Any, info: ValidationInfo) -> Any:
        given = value.model_dump(exclude_unset=True) if isinstance(value, OptimizerSection) else value
        objective = info.data.get("objective")  # None if its own settings are refused
        if objective is None or not isinstance(given, dict):
            return given
        return {"lr": objective.usual_rate, **given}

    @property
    def passes(self) -> int | None:
        """Number of epochs; None if the run counts steps, whose rows are drawn with replacement."""
        return (self.epochs or 1) if self.steps is None else None

    def faults(self) -> Iterator[str]:
        if self.steps is not None and self.epochs is not None:
            yield "steps and epochs: set only one of them"
        if self.passes is not None and any(file.probability for file in self.data.files()):
            yield (
                "epochs: an epoch visits every row equally often, but data.train has probabilities; set "
                "steps instead"
            )
        if self.keep_best and not self.data.validation:
            yield "keep_best: nothing is validated; set tune.data.validation"
