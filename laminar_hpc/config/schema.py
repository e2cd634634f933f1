"""Every key of a config, with its default and its bounds. Nothing here opens a file or imports an engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _chunk_bytes(value: int) -> int:
    if value != 0 and not 1024 <= value <= 1 << 30:
        raise ValueError(f"must be 0 (chosen from the measured links) or from 1024 to {1 << 30}, got {value}")
    return value


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""At most 11 days: timers of the operating system and of libraries overflow beyond 24."""
ChunkBytes = Annotated[int, AfterValidator(_chunk_bytes)]


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
    spares: Count = 0
    """Ranks on each rollout node that wait to take over from its relay, should it be lost."""
    worker_restarts: Count = 3
    """How often, within ten minutes, a rollout starts its engine again before the job ends; and how often the trainers' workers
    are, which needs `checkpoint.every`."""
    relaunches: Count = 3
    """How often `laminar run` starts a job again that has failed or stalled, from a checkpoint that this start of it made; or
    that has lost a node of its Slurm allocation, from the newest one."""

    @property
    def ranks(self) -> int:
        """All ranks of the job, the manager's included."""
        return 1 + self.trainers + self.relays * (1 + self.spares) + self.rollouts


class Model(Section):
    """The model that is trained."""

    path: str = ""
    """A directory with config.json, safetensors and tokenizer.json, as Hugging Face writes it. Not needed where all is paced."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's weights, the image and the engines."""


class Task(Section):
    """Where prompts come from and how responses are graded."""

    name: Literal["reasoning_gym", "jsonl", "parquet", "synthetic"] = "reasoning_gym"
    """A reasoning-gym data set, or prompts from a JSON Lines or a Parquet file; synthetic: prompts that have a length and no
    meaning, for paced engines."""
    dataset: str = "chain_sum"
    """reasoning_gym: the data set's name."""
    parameters: dict[str, Any] = {}
    """reasoning_gym: the data set's own parameters. synthetic: `min_tokens` and `max_tokens` of a prompt."""
    path: str = ""
    """jsonl, parquet: the file; a row has a prompt and an answer in the columns named below."""
    held_out_path: str = ""
    """jsonl, parquet: the file with the held-out prompts ("": the last `evaluation.prompts` rows of `path`)."""
    prompt_column: str = "prompt"
    """jsonl, parquet: the column with the prompt: a text, or a list of chat messages {"role": ..., "content": ...}. Dots go
    into nested columns. GSM8K: "question"; DAPO-Math-17k: "prompt"."""
    answer_column: str = "answer"
    """jsonl, parquet: the column with the answer, a text. GSM8K: "answer", of which what follows "####" counts;
    DAPO-Math-17k: "reward_model.ground_truth"."""
    verifier: Literal["exact", "number", "math"] = "exact"
    """jsonl, parquet: how a response is compared with the answer; math: by math-verify, as mathematical expressions."""
    prompts: Positive = 10_000
    """reasoning_gym, synthetic: how many different training prompts."""
    template: str = "{prompt}"
    """The text given to the model, or the user's message where `chat` is set; {prompt} stands for the prompt."""
    chat: bool = False
    """Put the text as the user's message into the chat template that the model directory has."""
    system: str = ""
    """chat: the system message ("": none but the template's own)."""
    overlong_tokens: Count = 0
    """Length of the interval before `rollout.max_response_tokens` in which the reward falls by up to 1, as in DAPO (0: off)."""
    deadline_s: Seconds = 5.0
    """How long grading one response may take."""
    prompt_deadline_s: Seconds = 30.0
    """How long making one prompt may take, from the data set's row to the model's tokens."""

    @model_validator(mode="after")
    def _check(self) -> Task:
        if self.name in ("jsonl", "parquet") and not self.path:
            raise ValueError(f"task.path is required where task.name is {self.name!r}")
        if "{prompt}" not in self.template:
            raise ValueError("task.template must contain {prompt}")
        return self


class Rollout(Section):
    """How responses are generated."""

    engine: Literal["torch", "vllm", "paced"] = "torch"
    """The inference engine; paced: none, but the time that one takes on a GPU (section paced)."""
    tensor_parallel: Positive = 1
    """vllm: GPUs, or on a CPU processes, that one engine is spread over; all on its node."""
    kv_cache_tokens: Count = 0
    """vllm, paced: tokens that the KV cache has room for (0: for vllm `slots` times prompt and response at their longest, or
    on a GPU all the memory that `gpu_memory_share` leaves; for paced what the costs say)."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    """vllm: the share of a GPU's memory that the engine may take."""
    eager: bool = False
    """vllm: run without CUDA graphs and compilation; starts sooner, decodes more slowly."""
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


LOSSES = {
    "grpo": {"clip_high": 0.2, "aggregation": "sequence_mean"},
    "dapo": {"clip_high": 0.28, "aggregation": "token_mean"},
}
"""What `trainer.loss` sets where the config does not: GRPO as in arXiv 2402.03300, DAPO as in arXiv 2503.14476."""


class Trainer(Section):
    """The optimizer and its loss."""

    engine: Literal["torch", "megatron", "paced"] = "torch"
    """The training engine; paced: none, but the time that one takes (section paced)."""
    tensor_parallel: Positive = 1
    """megatron: trainers that share each layer's matrices. job.trainers / (tensor_parallel * pipeline_parallel) replicas
    train data-parallel."""
    pipeline_parallel: Positive = 1
    """megatron: stages that the layers are cut into."""
    recompute: Literal["none", "selective", "full"] = "none"
    """megatron: what the backward pass computes again instead of keeping it: attention only, or whole layers."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises from 0."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """0 switches clipping off."""
    loss: Literal["grpo", "dapo"] = "grpo"
    """Sets `clip_high`, `aggregation` and `batch.dynamic_sampling` where they are not set: grpo 0.2, "sequence_mean", false;
    dapo 0.28, "token_mean", true."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(ge=0)] = 0.0
    """Bound of the ratio's loss where the advantage is negative, more than 1 (0: none)."""
    aggregation: Literal["token_mean", "sequence_mean"] = "sequence_mean"
    """Over what the loss is averaged: all tokens of a mini-batch, or its sequences."""
    correction: Literal["none", "tis_token", "tis_sequence", "icepop", "decoupled"] = "none"
    """What is done about the difference between the policy that generated and the trainer's at the start of the step."""
    correction_cap: Annotated[float, Field(gt=0)] = 2.0
    """tis_token, tis_sequence: the largest importance weight."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """icepop: tokens with a smaller importance weight are masked."""
    correction_high: Annotated[float, Field(gt=0)] = 5.0
    """icepop: tokens with a larger importance weight are masked."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the model at `model.path` as it was at the start (0: no reference model is kept)."""
    micro_batch_tokens: Positive = 16_384
    """Padded tokens of one forward and backward pass; less memory, same gradients."""
    timeout_s: Seconds = 500.0
    """How long a worker may train on one mini-batch, the wait for other trainers included, before it counts as lost."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_loss(cls, values: Any) -> Any:
        preset = LOSSES.get(str(values.get("loss"))) if isinstance(values, dict) else None
        return values if preset is None else preset | values

    @model_validator(mode="after")
    def _check(self) -> Trainer:
        if self.dual_clip and self.dual_clip <= 1.0:
            raise ValueError(f"trainer.dual_clip must be 0 (none) or more than 1, got {self.dual_clip:g}")
        if self.correction_high <= self.correction_low:
            raise ValueError(
                f"trainer.correction_high must be more than trainer.correction_low ({self.correction_low:g}), "
                f"got {self.correction_high:g}"
            )
        if self.engine != "megatron" and self.tensor_parallel * self.pipeline_parallel > 1:
            raise ValueError(
                f"trainer.tensor_parallel and trainer.pipeline_parallel must be 1 where trainer.engine is {self.engine!r}; "
                f"'megatron' has them"
            )
        return self


class Batch(Section):
    """How much a step trains on."""

    prompts: Positive = 32
    """Groups of one step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses to each prompt."""
    minibatches: Positive = 1
    """Optimizer steps of one step; each takes a share of the groups."""
    dynamic_sampling: bool | None = None
    """Discard groups whose responses all have the same reward, before the penalty of `task.overlong_tokens`, and draw others,
    as in DAPO (not set: where trainer.loss is 'dapo')."""

    @model_validator(mode="after")
    def _check(self) -> Batch:
        if self.prompts % self.minibatches:
            raise ValueError(
                f"batch.prompts must be a multiple of batch.minibatches, got {self.prompts} and {self.minibatches}"
            )
        return self


Mode = Literal["laminar", "sync", "one_step", "stream", "partial"]

MODES: tuple[str, ...] = get_args(Mode)
"""The values of `control.mode`, and the names of tables below `compare`."""


class Control(Section):
    """The pipeline."""

    mode: Mode = "laminar"
    """A row of policy/modes.py."""
    steps: Positive = 100
    """Training steps of the whole run."""
    colocated: bool = False
    """mode sync with paced engines: trainers and rollouts have the same GPUs, which turn from one to the other and back in each
    step, at the cost of `paced.switch_s`."""
    ahead: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Prompts are handed out while those in flight and in the buffer are at most (1 + ahead) steps' worth (mode laminar)."""
    sampler: Literal["fifo", "freshest", "weighted"] = "fifo"
    """Which finished groups a step takes first: the first finished, those of the newest weights, or at random, the stale ones
    less often. What the last two leave is trained on by the last steps, unless `eviction` or `capacity` throws it away."""
    sampler_half_life: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """weighted: how many versions of staleness make a group half as likely."""
    capacity: Count = 0
    """How many finished groups are kept at most: of more, the stalest are thrown away, and others generated in their place (0: no
    limit). Below (1 + `ahead`) * batch.prompts that goes on while a step is trained on, and most of all loses long responses."""
    eviction: Literal["none", "stale", "wait"] = "none"
    """Which finished groups are thrown away unused: none, or those that are staler than `max_staleness`. wait: none, since
    prompts are handed out and steps begin only so that no group becomes as stale (AReaL's rule)."""
    max_staleness: Positive = 8
    """eviction = "stale" or "wait", and mode partial: how stale a group may be when it is trained on."""


class Repack(Section):
    """How the last trajectories of several rollouts are put together, so that the others start on newer weights."""

    enabled: bool = True
    """Off: each rollout goes on until its own last trajectory has ended, whatever the mode."""
    every_s: Seconds = 5.0
    """How often it is looked for; also after each publication."""
    kv_share: Annotated[float, Field(gt=0, le=1)] = 0.99
    """The share of its KV cache that a destination may fill until the next look."""
    batch: Count = 0
    """The most trajectories of a destination (0: the most whose decode step, as measured while the job runs, takes at most
    1.5 times that of 8). Never more than `rollout.slots`."""
    gain_gate: bool = True
    """Move only where more time is expected to be saved than the prefill takes, and while there are prompts to hand out. Off:
    whatever fits is moved."""
    delay_share: Annotated[float, Field(ge=0)] = 0.12
    """By which share of the time that a trajectory is expected to take from its hand-out to its end all moves together may delay
    it (0: by any). Only with `gain_gate`."""


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

    transport: Literal["mpi", "nixl"] = "mpi"
    """What carries chunks from node to node: MPI's point-to-point messages, or NIXL (RDMA over UCX)."""
    chunk_bytes: ChunkBytes = 0
    """Unit of transfer and of checksums (0: chosen at the start, from the image's size and the measured links)."""
    window: Annotated[int, Field(ge=1, le=64)] = 4
    """Chunks a relay has asked for and not got yet."""
    slots: Annotated[int, Field(ge=2)] = 3
    """Versions that a relay has room for."""
    verify: bool = True
    """Checks digests at every hop, and records one of the weights inside the engine after each pull."""
    relay_timeout_s: Seconds = 5.0
    """After how long without a word from a relay, or without a chunk over a link, the chain is repaired around it.

    The last relay, with nobody to take its place, has `job.silence_timeout_s` instead."""


PUBLISHED_LENGTHS = ("7b-math", "32b-math", "72b-math")
"""Names of `paced.lengths`; anything else is a file."""

Cost = Annotated[float, Field(ge=0, le=1e6)]
"""Seconds of the hardware that is emulated."""


class Paced(Section):
    """Emulated GPUs: engines and trainers that take the time of real ones, by a table of costs, and compute little or nothing.

    Costs are seconds of the emulated hardware. Those that are not set are the ones of `model`, published or fitted
    (laminar_hpc/data/README.md).
    """

    model: Literal["7b", "32b", "72b"] = "32b"
    """Whose costs: Qwen2.5 of this size, one engine on 1, 4 or 8 H800."""
    time_scale: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Seconds of this machine for an emulated one: 0.1 is ten times faster than the hardware that is emulated."""
    tokens: Literal["lengths", "model"] = "lengths"
    """lengths: responses have a length and no meaning; then trainer and task must be paced and synthetic, and no model is
    needed. model: those that the model at model.path makes, computed ahead of time by the torch engine."""
    lengths: str = ""
    """lengths: how long responses are: "7b-math", "32b-math", "72b-math" as published, or a CSV file with the header
    "tokens,cdf" ("": those of `model`). model: how many decode steps a response takes, over which its tokens are spread
    evenly ("": as many as it has tokens)."""
    train: bool = False
    """model: trainers take the time of the table too, where they would be sooner done; `train_token_s` counts the model's tokens,
    however many decode steps `lengths` makes of them."""
    decode: list[tuple[Positive, Cost]] = []
    """Points [batch, seconds] of a decode step, batches rising; between them it is linear, behind them the last slope goes on."""
    step_overhead_s: Cost | None = None
    """What a real engine's loop adds to each decode step."""
    prefill_call_s: Cost | None = None
    """Of each step in which prompts are prefilled."""
    prefill_token_s: Cost | None = None
    """Of each token that is prefilled."""
    train_call_s: Cost | None = None
    """Of each mini-batch."""
    train_token_s: Cost | None = None
    """Of each token, prompts included, that one trainer of the job trains on."""
    publish_s: Cost | None = None
    """How long a trainer stands still to publish its weights."""
    load_s: Cost | None = None
    """How long an engine stands still to load weights."""
    switch_s: Cost | None = None
    """control.colocated: how long all GPUs stand still in each step, to turn from generating to training and back."""
    image_bytes: Annotated[int, Field(ge=8, le=1 << 40)] = 1 << 20
    """trainer.engine = "paced": size of the weight image, whose bytes have no meaning."""


class Record(Section):
    """What is written while the job runs."""

    flush_s: Seconds = 2.0
    """How often the files are brought up to date; a kill loses at most this much."""
    events: bool = True
    """Keep every event and command, for replay."""
    tokens: bool = False
    """Keep the tokens of finished trajectories."""


class Checkpoint(Section):
    """What a run can be resumed from, in `run_dir`/checkpoints."""

    every: Count = 0
    """A checkpoint every so many steps, and after the last one (0: none but those on being asked to stop). With it, a trainer's
    worker that is lost is replaced on the spot: the steps since the last checkpoint are trained again, so their batches are
    kept in memory."""
    on_stop: bool = True
    """SIGTERM and SIGUSR1 end the step, write a checkpoint and end the job as "requeue", for `laminar resume`."""
    keep: Positive = 2
    """How many are kept."""
    grace_s: Seconds = 120.0
    """How long a job that is to stop may take to end its step and write; then it ends without a checkpoint."""


class Config(Section):
    """A whole run."""

    run_dir: str
    """A directory that does not exist yet; everything the run writes goes there."""
    job: Job = Job()
    model: Model = Model()
    task: Task = Task()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    batch: Batch = Batch()
    control: Control = Control()
    repack: Repack = Repack()
    evaluation: Evaluation = Evaluation()
    weights: Weights = Weights()
    paced: Paced = Paced()
    record: Record = Record()
    checkpoint: Checkpoint = Checkpoint()
    compare: dict[Mode, dict[str, Any]] = {}
    """`laminar compare`: sections that are put over the others where a mode has its turn, as in [compare.sync.job]. A single run
    has no use for them."""

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.job.rollouts % self.job.relays:
            raise ValueError(
                f"job.rollouts must be a multiple of job.relays (the same number of rollouts on each node), "
                f"got {self.job.rollouts} and {self.job.relays}"
            )
        shards = self.trainer.tensor_parallel * self.trainer.pipeline_parallel
        if self.job.trainers % shards:
            raise ValueError(
                f"job.trainers must be a multiple of trainer.tensor_parallel * trainer.pipeline_parallel ({shards}), "
                f"got {self.job.trainers}"
            )
        if self.rollout.engine != "vllm" and self.rollout.tensor_parallel > 1:
            raise ValueError(
                f"rollout.tensor_parallel must be 1 where rollout.engine is {self.rollout.engine!r}; 'vllm' has it"
            )
        self._check_paced()
        if 2 * self.job.heartbeat_s > self.job.silence_timeout_s:
            raise ValueError(
                f"job.silence_timeout_s must be at least twice job.heartbeat_s ({self.job.heartbeat_s:g}), "
                f"got {self.job.silence_timeout_s:g}"
            )
        if 0 < self.control.capacity < self.batch.prompts:
            raise ValueError(
                f"control.capacity must be 0 or at least batch.prompts ({self.batch.prompts}), got {self.control.capacity}"
            )
        if self.rollout.concurrency < self.batch.group_size:
            raise ValueError(
                f"rollout.concurrency must be at least batch.group_size ({self.batch.group_size}), got {self.rollout.concurrency}"
            )
        return self

    def _check_paced(self) -> None:
        """What has no meaning goes only to what asks for none."""
        for key, value, name in (
            ("trainer.engine", self.trainer.engine, "paced"),
            ("task.name", self.task.name, "synthetic"),
        ):
            if self.timing_only and value != name:
                raise ValueError(
                    f"{key} must be {name!r} where rollout.engine is 'paced' and paced.tokens is 'lengths', got {value!r}"
                )
            if not self.timing_only and value == name:
                raise ValueError(f"{key} = {name!r} needs rollout.engine = 'paced' and paced.tokens = 'lengths'")
        if not self.timing_only and not self.model.path:
            raise ValueError("model.path is required")

    @property
    def timing_only(self) -> bool:
        """Whether responses have a length and no meaning, so that no model is needed, and none is trained."""
        return self.rollout.engine == "paced" and self.paced.tokens == "lengths"

    @property
    def stretched(self) -> bool:
        """Whether responses of a model take the decode steps of a distribution of lengths."""
        return self.rollout.engine == "paced" and not self.timing_only and bool(self.paced.lengths)

    @property
    def timed_trainer(self) -> bool:
        """Whether trainers learn, in the time of emulated ones."""
        return self.rollout.engine == "paced" and not self.timing_only and self.paced.train

    @property
    def replicas(self) -> int:
        """Copies of the model that train data-parallel, each on its own share of a mini-batch."""
        return self.job.trainers // (self.trainer.tensor_parallel * self.trainer.pipeline_parallel)

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups whose responses all have the same reward are discarded."""
        chosen = self.batch.dynamic_sampling
        return self.trainer.loss == "dapo" if chosen is None else chosen
