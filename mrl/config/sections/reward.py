"""How responses are verified: which verifier for which domain, its rules, and the pool that runs
verifiers."""

from typing import Literal

from pydantic import Field, model_validator

from mrl.config.sections.base import Section

Kind = Literal["maths", "code", "code_service", "instructions", "format", "repetition", "plugin"]
Style = Literal["native", "verl", "trl", "openrlhf"]


class MathsRules(Section):
    """What counts as the final answer and which forms are equal."""

    extraction: tuple[Literal["boxed", "gsm8k", "answer", "whole_response", "last_number"], ...] = (
        "boxed",
        "gsm8k",
        "answer",
        "whole_response",
    )
    """Places a final answer may stand in, tried in this order: \\boxed{}, behind GSM8K's ####, behind "Answer:", all of
    the response, the last number in it."""
    on_conflict: Literal["wrong", "last"] = "wrong"
    """A response with different final answers in the same place: wrong, or the last one counts."""
    percent: Literal["ignore", "value", "wrong"] = "ignore"
    """A percent sign in the answer is dropped, divides by 100, or makes the answer wrong unless the ground
    truth has one."""
    symbolic: bool = True
    """Answers that are no plain numbers are compared symbolically, in a process that can be killed."""
    relative_tolerance: float = Field(default=0.0, ge=0, lt=1)
    """Relative error allowed between two numbers; 0 is exact."""
    irrational: Literal["rounded", "exact"] = "rounded"
    """An irrational ground truth accepts decimals that are it, correctly rounded to as many significant digits as the answer
    shows (at least six), or nothing but the number itself."""
    unevaluated: Literal["wrong", "equal"] = "wrong"
    """Where the ground truth is an integer: an answer with an operation left to do (37 \\cdot 43, 84/2, 2^{10}, \\sqrt{16},
    a number in another base) is no answer, or is compared by its value."""
    imaginary_unit: Literal["i", "j", "none"] = "i"
    """The letter that is the imaginary unit; none where i and j are variables."""
    lists: Literal["any_order", "ordered"] = "any_order"
    """Whether the order counts in a list without brackets (1, 2, 3); in brackets it does, in a set it does not."""
    max_answer_chars: int = Field(default=400, ge=1)
    """Longer answers are refused before anything parses them."""


class CodeRules(Section):
    """Limits of one program run."""

    seconds: float = Field(default=5.0, gt=0)
    """Time of one process of the candidate by the clock, without what it waited for a processor."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """Processor time of one process of the candidate with its children."""
    memory_mib: int = Field(default=512, ge=32)
    """Memory of the candidate's processes; where no cgroup can be made, its files are a part of it."""
    processes: int = Field(default=32, ge=1)
    """Processes and threads of the candidate together."""
    output_kib: int = Field(default=256, ge=1)
    """Output bytes read before the run counts as over its limit."""
    file_mib: int = Field(default=32, ge=1)
    """Size of the writable file system."""
    partial: bool = False
    """The value is the share of passed cases rather than all or nothing."""
    cases_per_process: int = Field(default=16, ge=1)
    """Cases of a function-call task that share one process."""


class InstructionRules(Section):
    """How the checks of a row make a value."""

    partial: bool = False
    """The value is the share of passed checks rather than all or nothing."""


class FormatRules(Section):
    """Shape of a response."""

    tags: tuple[str, ...] = ("think", "answer")
    """Tags that must each open and close once, in this order, with content."""
    final_answer: bool = False
    """There must be exactly one final answer, behind whatever mark (a box, ####, "Answer:"), outside the first
    tag."""


class RepetitionRules(Section):
    """Penalty for repeated text."""

    ngram: int = Field(default=20, ge=1)
    """Words per n-gram; characters in scripts without spaces."""
    max_penalty: float = Field(default=1.0, ge=0)
    """Size of the penalty when every n-gram is a repetition."""


class RewardPart(Section):
    """One verifier."""

    kind: Kind | None = None
    """Which verifier."""
    name: str = ""
    """Name in the verdict's parts; by default the kind."""
    weight: float = 1.0
    """Factor in a sum of parts."""
    maths: MathsRules = MathsRules()
    """Rules of the maths verifier."""
    code: CodeRules = CodeRules()
    """Rules of the code verifier."""
    instructions: InstructionRules = InstructionRules()
    """Rules of the instruction verifier."""
    format: FormatRules = FormatRules()
    """Rules of the format verifier."""
    repetition: RepetitionRules = RepetitionRules()
    """Rules of the repetition verifier."""
    path: str | None = None
    """Plug-in as package.module:function or file.py:function; base URL of a code service."""
    style: Style = "native"
    """Calling convention of the plug-in."""
    group: bool = False
    """The plug-in scores all samples of a prompt in one call."""
    truncated: Literal["score", "min_reward"] = "score"
    """A response cut off at its limit is scored as it is, or carries the lowest value."""
    min_reward: float = 0.0
    """Value of a rejected response."""
    value_range: tuple[float, float] | None = None
    """A value outside makes the verifier, not the sample, count as failed."""
    deadline_seconds: float = Field(default=10.0, gt=0)
    """Longest work on one sample, counted from the start of the work, without waits for a processor."""
    memory_mib: int = Field(default=2048, ge=128)
    """Private memory of a reward worker."""
    workers: int | None = Field(default=None, ge=1)
    """Processes for this verifier; by default `reward.workers`."""
    concurrency: int = Field(default=64, ge=1)
    """Samples (groups) that one process has in flight where the verifier waits: async plug-ins and code
    services."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> "RewardPart":
        if self.kind in ("plugin", "code_service") and not self.path:
            raise ValueError(f"kind = {self.kind} needs path")
        if self.kind == "plugin" and ":" not in (self.path or ""):
            raise ValueError(
                f"path = {self.path!r}: a plug-in is named package.module:function or file.py:function"
            )
        if self.group and self.kind != "plugin":
            raise ValueError("group = true is for plug-ins")
        return self

    @property
    def label(self) -> str:
        return self.name or self.kind or "reward"


class RewardSpec(RewardPart):
    """What rewards one domain: one verifier, or a weighted sum of several."""

    parts: tuple[RewardPart, ...] = ()
    """Verifiers whose weighted values are added; kind is left out then."""

    @model_validator(mode="after")
    def _kind_or_parts(self) -> "RewardSpec":
        if self.parts and self.kind is not None:
            raise ValueError("kind and parts exclude each other; put the verifier into parts")
        if any(part.kind is None for part in self.parts):
            raise ValueError("every one of parts needs a kind")
        names = [part.label for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError(f"parts have the names {names}; give each its own name")
        return self

    def verifiers(self) -> tuple[RewardPart, ...]:
        """The verifiers whose weighted values make the reward."""
        return self.parts or (self,)


class RewardSection(RewardSpec):
    """The verifiers of a run and the pool of processes they work in."""

    domains: dict[str, RewardSpec] = {}
    """The verifier of each domain; a domain that is not named here has the verifier above."""
    workers: int = Field(default=2, ge=1)  # type: ignore[assignment] a part without a number has this one
    """Processes for each kind of work (on each node that has any), where a part says no other number."""
    nodes: Literal["driver", "all"] = "driver"
    """Reward processes run on the driver's node, or on every node of the run, each with its share of the
    prompts."""
    retries: int = Field(default=2, ge=0)
    """Further attempts after a verifier failed on a sample."""
    tasks_per_worker: int = Field(default=2000, ge=1)
    """A worker is replaced after so many pieces of work: a sample, a group, or a batch of cheap checks."""
    idle_seconds: float = Field(default=900.0, gt=0)
    """A worker without work for so long ends; the next sample starts another one."""
    queue_limit: int = Field(default=4096, ge=1)
    """Samples waiting; above it, handing in another one waits."""
    no_reward_alarm: float = Field(default=0.02, ge=0, le=1)
    """Share of samples without a reward above which a warning is written."""

    @model_validator(mode="after")
    def _some_verifier(self) -> "RewardSection":
        if self.kind is None and not self.parts and not self.domains:
            raise ValueError("needs kind (maths, code, instructions, format, plugin, ...), parts or domains")
        for domain, spec in self.domains.items():
            if spec.kind is None and not spec.parts:
                raise ValueError(f"domains.{domain} needs kind or parts")
        return self

    def all_verifiers(self) -> list[RewardPart]:
        """Every verifier of every domain."""
        own = [self] if self.kind is not None or self.parts else []
        return [part for spec in (*own, *self.domains.values()) for part in spec.verifiers()]

    def for_domain(self, domain: str) -> RewardSpec:
        """The verifier of a domain. Raises KeyError where there is none."""
        if domain in self.domains:
            return self.domains[domain]
        if self.kind is None and not self.parts:
            raise KeyError(
                f"reward.domains has no {domain!r} (it has {sorted(self.domains)}) and there is no default"
            )
        return self
