"""Tuning on rows instead of rewards: demonstrations (sft), preferences (the DPO family), or a reward model of them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from mrl.config.sections.training import OptimizerSection
from mrl.section import Section, named

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
    "kto": frozenset({"beta", "wanted_weight", "unwanted_weight"}),
    "hinge": PAIR_SETTINGS,
    "apo_zero": PAIR_SETTINGS,
    "apo_down": PAIR_SETTINGS,
    "exo": PAIR_SETTINGS | {"smoothing"},
    "custom": PAIR_SETTINGS | {"function", "options"},
    "reward_model": frozenset({"smoothing", "center"}),
}
"""Objective -> the settings that it reads; any other one that is not at its default is refused."""

WITHOUT_REFERENCE = frozenset({"sft", "simpo", "orpo", "reward_model"})


class CenterSection(Section):
    """Keeps the scores of a reward model around 0, which differences leave free."""

    kind: Literal["pair", "batch_sum", "batch_mean"] = "pair"
    """What is squared: the sum of a pair's two scores (mean over pairs), the sum of all scores of a step (batch-sum
    regularisation), or their mean."""
    weight: float = Field(gt=0)
    """Weight of the square: about 0.01 for pair, 0.001 for batch_sum."""


class ObjectiveSection(Section):
    """What a tuning step minimises; formulas stand in docs/design/preference.md."""

    name: Annotated[ObjectiveName, BeforeValidator(named("tune.objective", ObjectiveName))] = "sft"
    """Cross-entropy of demonstrations (sft), a loss over pairs of a chosen and a rejected response, or over single responses
    with a label (kto); reward_model trains a model that gives a score, not the policy."""
    average: Literal["tokens", "sequences"] = "tokens"
    """Of sft: mean over the step's trained tokens, or mean of the rows' own means."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-ratio to the reference (orpo: weight of the odds-ratio term)."""
    length: Literal["sum", "mean"] | None = None
    """Log-ratio of a response: sum over its tokens, or their mean; sum by default, and to be said for ipo, where papers and
    programs differ."""
    smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs taken to be labelled the wrong way round."""
    gamma_over_beta: float = Field(default=0.5, ge=0)
    """Of simpo: the margin asked for, in units of beta."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen responses' own loss: mean over the step of each response's mean."""
    wanted_weight: float = Field(default=1.0, gt=0)
    """Of kto: weight of responses labelled true."""
    unwanted_weight: float = Field(default=1.0, gt=0)
    """Of kto: weight of responses labelled false."""
    center: CenterSection | None = None
    """Of reward_model: a term that keeps scores around 0."""
    function: str | None = None
    """Of custom: package.module:function or file.py:function that gives the loss of each pair, as docs/design/preference.md says."""
    options: dict[str, Any] = {}
    """Of custom: further arguments of the function."""

    def faults(self) -> Iterator[str]:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name for name in defaults if name != "name" and getattr(self, name) != defaults[name]}
        if unread := sorted(changed - READS[self.name]):
            yield f"{unread[0]}: not read by {self.name}, which reads {sorted(READS[self.name])}"
        if self.name == "ipo" and self.length is None:
            yield "length: ipo needs it: sum (the paper) or mean (its authors' later advice)"
        if self.name == "exo" and not self.smoothing:
            yield "smoothing: exo takes its logarithm; set it above 0, for instance 0.001"
        if (self.name == "custom") != (self.function is not None):
            yield (
                "function: to be given for custom, as package.module:function or file.py:function, and for nothing else"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the starting point."""
        return self.name not in WITHOUT_REFERENCE

    @property
    def usual_rate(self) -> float:
        """The learning rate where none is given: what papers and programs use for models of 1B parameters and more."""
        return 1e-5 if self.name == "sft" or self.is_reward_model else 1e-6

    @property
    def takes_pairs(self) -> bool:
        """Whether a row is a chosen and a rejected response."""
        return self.name not in ("sft", "kto")

    @property
    def is_reward_model(self) -> bool:
        """Whether what is trained gives a score in place of log-probs."""
        return self.name == "reward_model"

    @property
    def couples_scores(self) -> bool:
        """Whether a term of the loss needs the scores of the whole step."""
        return self.center is not None and self.center.kind != "pair"


class TuneFile(Section):
    """One file of rows of a mix."""

    path: str
    """A file, or a data set of the hub, of any kind that data.train may name."""
    probability: float | None = Field(default=None, gt=0)
    """Share of the rows that are drawn, relative to the other files; by default in proportion to their rows."""


class TuneDataSection(Section):
    """Rows to tune on."""

    train: str | tuple[TuneFile, ...]
    """A file, or a mix of files."""
    validation: str | None = None
    """Rows that are measured and never trained on."""
    over_long: Literal["filter", "refuse"] = "refuse"
    """Rows longer than model.max_length are left out and counted, pairs as a whole, or end the run; nothing is cut."""
    turns: Literal["all", "last"] = "all"
    """Of conversations in sft: train on every message of the assistant, or on the last one alone."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template."""

    @field_validator("train")
    @classmethod
    def _all_or_none(cls, value: Any) -> Any:
        given = [] if isinstance(value, str) else [each.probability is not None for each in value]
        if not value or (any(given) and not all(given)):
            raise ValueError("names no file, or gives a probability to some files only; give all or none")
        return value

    def files(self) -> tuple[TuneFile, ...]:
        """The training files, a plain path being one."""
        return (TuneFile(path=self.train),) if isinstance(self.train, str) else self.train


class TuneOptimizerSection(OptimizerSection):
    """The optimizer of `mrl tune`."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate; if none is given, 1e-5 for sft and reward models, 1e-6 for dpo and its relatives."""


class TuneSection(Section):
    """Tuning with the same Megatron worker, without engines: `mrl tune`."""

    objective: ObjectiveSection = ObjectiveSection()
    """What is minimised."""
    data: TuneDataSection
    """Demonstrations or preferences."""
    output: str
    """New folder for the tuned model, in Hugging Face format."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, whose rows are drawn with replacement."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over all rows instead, each in an order of its own; rows that do not fill a last step wait for the next one. If
    neither steps nor epochs is given, there is one epoch."""
    batch_rows: int = Field(default=256, ge=1)
    """Rows of one step; a pair is one row."""
    optimizer: TuneOptimizerSection = TuneOptimizerSection()
    """The optimizer of `mrl tune`; `training.optimizer` has no part in it."""
    validate_every: int = Field(default=0, ge=0)
    """Steps between validations; there is always one before the first and after the last step where data.validation is given."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints to resume from; 0 saves only when the run is asked to stop."""
    keep_best: str | None = None
    """Metric of the validation (for instance val/preference/accuracy) whose best weights are exported instead of the last;
    the smallest is best of val/loss, the largest of any other."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _rate_of_the_objective(cls, value: Any, info: ValidationInfo) -> Any:
        given = value.model_dump(exclude_unset=True) if isinstance(value, OptimizerSection) else value
        objective = info.data.get("objective")  # none where its own settings are refused
        if objective is None or not isinstance(given, dict):
            return given
        return {"lr": objective.usual_rate, **given}

    @property
    def passes(self) -> int | None:
        """Epochs of the run; None if it counts steps, whose rows are drawn with replacement."""
        return (self.epochs or 1) if self.steps is None else None

    def faults(self) -> Iterator[str]:
        if self.steps is not None and self.epochs is not None:
            yield "steps and epochs: give one of them"
        if self.passes is not None and any(file.probability for file in self.data.files()):
            yield (
                "epochs: an epoch visits every row equally often; data.train gives probabilities, so set steps instead"
            )
        if self.keep_best and not self.data.validation:
            yield "keep_best: nothing is validated; give tune.data.validation"
