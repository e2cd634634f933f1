"""What things take in the simulator: the tables of the paced engines, in the clock of the job that is simulated."""

from __future__ import annotations

from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import costs_of, response_lengths
from laminar_hpc.policy.chain import ASSUMED_BYTE_S, ASSUMED_STARTUP_S, best_chunk_bytes, broadcast_seconds
from laminar_hpc.protocol.commands import Sample
from laminar_hpc.protocol.trajectory import Stop, TrajectorySpec
from laminar_hpc.rollout.paced_tokens import drawn_length
from laminar_hpc.tasks.synthetic_task import SyntheticTask
from laminar_hpc.trainer.api import needs_proximal, needs_reference
from laminar_hpc.trainer.paced import FORWARD_SHARE


class SimulatedCosts:
    """Seconds of the job's clock, of which an emulated second takes `paced.time_scale`; `engine` alone is in emulated ones."""

    def __init__(self, config: Config) -> None:
        """Of a config that `check_paced` lets in."""
        self.scale = config.paced.time_scale
        self.engine = costs_of(config)
        self.publish_s = self.engine.published_s * self.scale
        self.load_s = self.engine.load_s * self.scale
        self._lengths = response_lengths(config)
        self._longest = config.rollout.max_response_tokens
        self._task = SyntheticTask(config)
        self._prompts: dict[tuple[str, int], int] = {}
        self._scores = needs_proximal(config.trainer, config.batch.minibatches) + needs_reference(config.trainer)
        self.image_bytes = config.paced.image_bytes
        relays, chunk_bytes = config.job.relays, config.weights.chunk_bytes
        self._chunk_bytes = chunk_bytes or best_chunk_bytes(relays, self.image_bytes, ASSUMED_STARTUP_S, ASSUMED_BYTE_S)

    # --- trajectories -----------------------------------------------------------------------------------------------

    def prompt_tokens(self, spec: TrajectorySpec) -> int:
        """The length of a trajectory's prompt."""
        key = (spec.purpose.value, spec.prompt)
        if key not in self._prompts:
            self._prompts[key] = self._task.prompt_tokens(spec.purpose, spec.prompt)
        return self._prompts[key]

    def response_tokens(self, spec: TrajectorySpec) -> int:
        """How long its response will be: as the paced engine draws it."""
        return drawn_length(self._lengths, spec.seed, self._longest)

    def stop(self, response_tokens: int) -> Stop:
        """Why a response of this length ends."""
        return Stop.LENGTH if response_tokens >= self._longest else Stop.END_TOKEN

    def reward(self, response_tokens: int) -> float:
        """What a response of this length earns."""
        return self._task.reward(response_tokens)

    # --- training and weights ---------------------------------------------------------------------------------------

    def train_s(self, samples: list[Sample]) -> float:
        """A mini-batch of which a trainer has these samples."""
        return self.engine.train_s(_tokens(samples)) * self.scale

    @property
    def scores_first(self) -> bool:
        """Whether a step is scored as a whole before any of it is trained on."""
        return self._scores > 0

    def score_s(self, samples: list[Sample]) -> float:
        """Scoring a mini-batch before it is trained on, once for each log-probability that the loss needs."""
        return self._scores * FORWARD_SHARE * self.train_s(samples)

    def reception_s(self, place: int, remote_master: bool) -> float:
        """From a broadcast to the moment when relay number `place` of the chain (the master is 0) holds the version.

        By the chain's formula, with `paced.image_bytes` over links that nobody has measured, which is not scaled: so it is
        in a job of paced engines on one machine.
        """
        chunks = -(-self.image_bytes // self._chunk_bytes)
        return broadcast_seconds(
            place + 1, self.image_bytes, chunks, ASSUMED_STARTUP_S, ASSUMED_BYTE_S, remote_master=remote_master
        )


def _tokens(samples: list[Sample]) -> int:
    return sum(sample.tokens for sample in samples)
