"""Every key of a config, with its default and its bounds. Nothing here opens a file or imports an engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A table of the config file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Job(Section):
    """How many ranks of each role, and how long the job bears with silence."""

    name: str = "run"
    """A name for people."""
    trainers: Positive = 1
    """Trainer ranks; with the torch trainer they are data-parallel."""
    rollouts: Positive = 2
    """Rollout ranks, one inference engine each."""
    relays: Positive = 1
    """Relay ranks: one for each node that has rollouts."""
    seed: Count = 0
    """Keys prompt order, sampling noise and everything else that is random."""
    threads: Positive = 1
    """CPU threads of each engine and trainer worker."""
    start_timeout_s: Seconds = 300.0
    """How long engines and trainers may take to come up."""
    stall_timeout_s: Seconds = 600.0
    """When nothing has moved for this long, the job prints who waits for whom and ends. Longer than any mini-batch takes."""
    heartbeat_s: Seconds = 2.0
    """How often each rank says that it is alive, and what it waits for."""
    silence_timeout_s: Seconds = 60.0
    """How long a rank may say nothing before it counts as hung."""
    worker_restarts: Count = 3
    """How often, within ten minutes, a rollout starts its engine again before the job ends."""

    @property
    def ranks(self) -> int:
        """All ranks of the job, the manager's included."""
        return 1 + self.trainers + self.relays + self.rollouts


class Model(Section):
    """The model that is trained."""

    path: str
    """A directory with config.json, safetensors and tokenizer.json, as Hugging Face writes it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's weights, the image and the engines."""


class Task(Section):
    """Where prompts come from and how responses are graded."""

    name: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    """A reasoning-gym data set, or prompts from a JSON Lines file."""
    dataset: str = "chain_sum"
    """reasoning_gym: the data set's name."""
    parameters: dict[str, Any] = {}
    """reasoning_gym: the data set's own parameters."""
    path: str = ""
    """jsonl: the file; a line is {"prompt": "...", "answer": "..."}."""
    held_out_path: str = ""
    """jsonl: the file with the held-out prompts ("": the last `evaluation.prompts` lines of `path`)."""
    verifier: Literal["exact", "number"] = "exact"
    """jsonl: how a response is compared with the answer."""
    prompts: Positive = 10_000
    """reasoning_gym: how many different training prompts."""
    template: str = "{prompt}"
    """The text given to the model; {prompt} stands for the prompt."""
    deadline_s: Seconds = 5.0
    """How long grading one response may take."""

    @model_validator(mode="after")
    def _check(self) -> Task:
        if self.name == "jsonl" and not self.path:
            raise ValueError("task.path is required where task.name is 'jsonl'")
        if "{prompt}" not in self.template:
            raise ValueError("task.template must contain {prompt}")
        return self


class Rollout(Section):
    """How responses are generated."""

    engine: Literal["torch"] = "torch"
    """The inference engine."""
    concurrency: Positive = 64
    """Trajectories a rollout takes at once, those waiting for a place in the KV cache included."""
    slots: Positive = 64
    """Trajectories that the KV cache has room for."""
    max_prompt_tokens: Positive = 256
    """Longer prompts are refused."""
    max_response_tokens: Positive = 256
    """Where a response without an end token is cut."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Of training trajectories; 0 is greedy."""
    stream_interval_s: Seconds = 0.25
    """How often partial responses go to the store; with hundreds of rollouts, the manager's load."""
    timeout_s: Seconds = 120.0
    """How long an engine that has work may say nothing before it is started again."""


class Trainer(Section):
    """The optimizer and its loss."""

    engine: Literal["torch"] = "torch"
    """The training engine."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises from 0."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """0 switches clipping off."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Over what the loss is averaged: all tokens of a mini-batch, or its sequences."""
    micro_batch_tokens: Positive = 16_384
    """Padded tokens of one forward and backward pass; less memory, same gradients."""


class Batch(Section):
    """How much a step trains on."""

    prompts: Positive = 32
    """Groups of one step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses to each prompt."""
    minibatches: Positive = 1
    """Optimizer steps of one step; each takes a share of the groups."""

    @model_validator(mode="after")
    def _check(self) -> Batch:
        if self.prompts % self.minibatches:
            raise ValueError(
                f"batch.prompts must be a multiple of batch.minibatches, got {self.prompts} and {self.minibatches}"
            )
        return self


class Control(Section):
    """The pipeline."""

    mode: Literal["laminar", "sync"] = "laminar"
    """A row of policy/modes.py."""
    steps: Positive = 100
    """Training steps of the whole run."""
    ahead: Annotated[float, Field(ge=0)] = 1.0
    """Prompts are handed out while those in flight and in the buffer are at most (1 + ahead) steps' worth (mode laminar)."""
    sampler: Literal["fifo"] = "fifo"
    """Which finished groups a step takes first."""
    eviction: Literal["none", "stale"] = "none"
    """Which finished groups are thrown away unused."""
    max_staleness: Positive = 8
    """eviction = "stale": groups older than this many versions go."""


class Evaluation(Section):
    """Held-out prompts, answered beside training."""

    every: Count = 10
    """Steps between two evaluations; the first and the last version are always evaluated. 0: never."""
    prompts: Positive = 200
    """Held-out prompts of each evaluation."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Of their responses; 0 is greedy."""


class Weights(Section):
    """How weights travel."""

    transport: Literal["mpi"] = "mpi"
    """What carries chunks from node to node."""
    chunk_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 1 << 20
    """Unit of transfer and of checksums."""
    window: Annotated[int, Field(ge=1, le=64)] = 4
    """Chunks a relay has asked for and not got yet."""
    slots: Annotated[int, Field(ge=2)] = 3
    """Versions that a relay has room for."""
    verify: bool = True
    """Checks digests at every hop, and records one of the weights inside the engine after each pull."""


class Record(Section):
    """What is written while the job runs."""

    flush_s: Seconds = 2.0
    """How often the files are brought up to date; a kill loses at most this much."""
    events: bool = True
    """Keep every event and command, for replay."""
    tokens: bool = False
    """Keep the tokens of finished trajectories."""


class Config(Section):
    """A whole run."""

    run_dir: str
    """A directory that does not exist yet; everything the run writes goes there."""
    job: Job = Job()
    model: Model
    task: Task = Task()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    batch: Batch = Batch()
    control: Control = Control()
    evaluation: Evaluation = Evaluation()
    weights: Weights = Weights()
    record: Record = Record()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.job.rollouts % self.job.relays:
            raise ValueError(
                f"job.rollouts must be a multiple of job.relays (the same number of rollouts on each node), "
                f"got {self.job.rollouts} and {self.job.relays}"
            )
        if 2 * self.job.heartbeat_s > self.job.silence_timeout_s:
            raise ValueError(
                f"job.silence_timeout_s must be at least twice job.heartbeat_s ({self.job.heartbeat_s:g}), "
                f"got {self.job.silence_timeout_s:g}"
            )
        if self.rollout.concurrency < self.batch.group_size:
            raise ValueError(
                f"rollout.concurrency must be at least batch.group_size ({self.batch.group_size}), got {self.rollout.concurrency}"
            )
        return self
