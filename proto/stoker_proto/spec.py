"""The job spec: what a user asks for. Field names follow Databricks AIR; unknown keys are refused with a suggestion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
Model = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,50}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./-]{1,100}$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$")]
JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,100}$")]


class Strict(BaseModel):
    """Part of a spec: immutable, and a key that is not in it is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Compute(Strict):
    """The GPUs asked for, as node type and total; a simulated node has model SIM."""

    accelerator_type: Annotated[str, StringConstraints(pattern=r"^GPU_[1-9][0-9]*x[A-Za-z0-9-]+$")] = Field(
        description="GPU_<n>x<model>: n GPUs used on each node, e.g. GPU_8xH100; ANY as model takes any GPU"
    )
    num_accelerators: int = Field(ge=1, le=100_000, description="total GPUs; a multiple of the per-node count")
    also_accept: tuple[Model, ...] = Field((), description="further GPU models that will do, beside the one named")
    gpu_fraction: float = Field(
        1.0, ge=0.001, le=1, description="share of each GPU that is needed, in thousandths; below 1 GPUs are shared"
    )
    cpus_per_node: float = Field(0, ge=0, le=4096, description="CPU cores set aside on each node")
    memory_gib_per_node: float = Field(0, ge=0, le=65536, description="host memory set aside on each node")
    within: Label | None = Field(
        None, description="a topology level (a node label such as rack) that the whole gang must share one value of"
    )
    queue: Name = "default"
    priority_class: Name = Field("NORMAL", description="one of the cluster's classes; BEST_EFFORT, NORMAL, CRITICAL")
    priority: int = Field(0, ge=-1000, le=1000, description="order inside queue and class; a higher number goes first")

    @property
    def milli(self) -> int:
        """The share of each GPU, in thousandths."""
        return round(self.gpu_fraction * 1000)

    @property
    def models(self) -> tuple[str, ...]:
        """GPU models that will do; none means any."""
        named = (self.model, *self.also_accept)
        return () if "ANY" in named else tuple(dict.fromkeys(named))

    @property
    def per_node(self) -> int:
        return int(self.accelerator_type.removeprefix("GPU_").split("x", 1)[0])

    @property
    def model(self) -> str:
        return self.accelerator_type.split("x", 1)[1]

    @property
    def nodes(self) -> int:
        return self.num_accelerators // self.per_node

    @model_validator(mode="after")
    def _whole_nodes(self) -> Compute:
        if abs(self.gpu_fraction * 1000 - self.milli) > 1e-6:
            raise ValueError(f"gpu_fraction {self.gpu_fraction} is finer than a thousandth")
        over = self.num_accelerators % self.per_node
        if over:
            below, above = self.num_accelerators - over, self.num_accelerators - over + self.per_node
            raise ValueError(
                f"num_accelerators {self.num_accelerators} is not a multiple of {self.per_node}, the GPUs per node in "
                f"{self.accelerator_type}; use {f'{below} or ' if below else ''}{above}"
            )
        return self


class Environment(Strict):
    """The Python environment of the job. The host environment is the node's own, with torch imported and warm."""

    version: Literal["host"] = Field("host", description="host: the node's own Python environment")


class CodeSource(Strict):
    """The code to run, sent as a content-addressed tree."""

    root_path: str = Field(".", description="directory to send, relative to the spec file")
    include_paths: tuple[str, ...] = Field(
        (), description="only these files and directories below root_path; empty: all"
    )


class Metric(Strict):
    """The metric that the job is judged by; its direction is declared, never guessed."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=250)]
    direction: Literal["minimize", "maximize"]
    at: Literal["last", "best"] = "last"


class Checkpoints(Strict):
    """Checkpoint convention: complete checkpoints below the job's checkpoint directory are kept and resumed from."""

    keep: int = Field(3, ge=1, le=1000)
    resume: Literal["auto", "never"] = "auto"


class Outputs(Strict):
    """What the job leaves behind."""

    checkpoints: Checkpoints | None = None


RetriedOutcome = Literal[
    "user_error", "oom", "infra_gpu", "infra_comm", "infra_node", "infra_storage", "lost", "launch_rejected",
    "sdc_suspect",
]  # fmt: skip


class Limits(Strict):
    """Bounds that the platform enforces."""

    timeout_minutes: float | None = Field(None, gt=0, description="wall time of one attempt once it runs")
    max_retries: int = Field(
        3, ge=0, le=100, description="retries after infrastructure faults; user errors never retry"
    )
    grace_seconds: float = Field(10.0, ge=0, le=3600, description="from the stop signal to SIGKILL")
    retries: dict[RetriedOutcome, Annotated[int, Field(ge=0, le=100)]] = Field(
        default_factory=dict, description="retries for one outcome, in place of max_retries"
    )


class After(Strict):
    """A job that must be over before this one may start."""

    job: JobId
    on: Literal["success", "failure", "end"] = Field(
        "success", description="how it must have ended; when it ends otherwise, this job fails"
    )


class Schedule(Strict):
    """When the job may run."""

    window: Name | None = Field(None, description="start only while this window of the cluster is open")
    after: tuple[After, ...] = Field((), max_length=1000, description="jobs that must be over first")
    hold: bool = Field(False, description="wait until somebody releases the job")
    deadline: AwareDatetime | None = Field(None, description="expire the job when it is not over by then")


class Array(Strict):
    """Many jobs of one spec: each gets its index as STOKER_ARRAY_INDEX."""

    size: int = Field(ge=1, le=10_000)
    at_once: int | None = Field(None, ge=1, description="how many of them may be active at a time")


Scalar = str | int | float | bool | None


class JobSpec(Strict):
    """A training job as asked for."""

    apiVersion: Literal["v1"] = "v1"
    experiment_name: Name = Field(description="also the MLflow experiment")
    compute: Compute
    environment: Environment = Environment(version="host")
    code_source: CodeSource | None = None
    command: str | None = Field(None, min_length=1, description="shell command, run once per node")
    entrypoint: str | None = Field(
        None, min_length=1, description="Python file; one rank per GPU, forked from a warm worker"
    )
    args: tuple[str, ...] = Field((), description="arguments of the entrypoint")
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="given to the job as JSON and to MLflow as params"
    )
    env_variables: dict[EnvName, str] = Field(default_factory=dict)
    metric: Metric | None = None
    outputs: Outputs = Outputs()
    limits: Limits = Limits()
    schedule: Schedule = Schedule()
    array: Array | None = None
    idempotency_token: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    mlflow_run_name: Annotated[str, StringConstraints(max_length=100)] | None = None
    labels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way_to_run(self) -> JobSpec:
        if (self.command is None) == (self.entrypoint is None):
            raise ValueError("give exactly one of command (a shell command per node) and entrypoint (a Python file)")
        if self.command is not None and self.args:
            raise ValueError("args belong to entrypoint; put them into command")
        return self
