"""A trainer in virtual time: mini-batches and publications one after the other, each as long as the tables say."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from laminar_hpc.protocol.commands import Publish, Sample, Train
from laminar_hpc.protocol.events import AnyEvent, Published, Trained, TrainerReady
from laminar_hpc.sim.costs import SimulatedCosts
from laminar_hpc.sim.kernel import Kernel
from laminar_hpc.sim.recording import PhaseClock, Recorder
from laminar_hpc.trainer.paced import NOTHING_LEARNED


class SimulatedTrainer:
    """One trainer rank, with its share of each mini-batch."""

    def __init__(
        self,
        rank: int,
        index: int,
        replica: int,
        costs: SimulatedCosts,
        kernel: Kernel,
        tell: Callable[[AnyEvent], None],
        recorder: Recorder | None,
    ) -> None:
        """Trainer number `index`, a shard of replica number `replica`; `tell` reaches the manager."""
        self.rank = rank
        self._index = index
        self._replica = replica
        self._costs = costs
        self._kernel = kernel
        self._tell = tell
        self._phases = PhaseClock(recorder, rank, "start")
        self._work: deque[Train | Publish] = deque()
        self._busy = False

    def report(self) -> None:
        """It holds the model."""
        self._phases.enter("wait", self._kernel.now)
        self._tell(TrainerReady(self.rank, 0, self._index))

    def obey(self, command: Train | Publish) -> None:
        """One thing more to do, after all that was asked for before."""
        self._work.append(command)
        if not self._busy:
            self._next()

    def close(self) -> None:
        """The job is over."""
        self._phases.tell(self._kernel.now)

    def _next(self) -> None:
        self._busy = False
        if not self._work:
            self._phases.enter("wait", self._kernel.now)
            return
        work = self._work[0]
        if isinstance(work, Publish):
            self._work.popleft()
            self._take("publish", self._costs.publish_s, lambda: self._published(work.version))
        elif self._costs.scores_first and work.minibatch == 0:
            self._score(work)
        else:
            self._train(0.0)

    def _score(self, first: Train) -> None:
        """A step that is scored first begins when all its mini-batches are there."""
        if len(self._work) < first.minibatches:
            self._phases.enter("wait", self._kernel.now)
            return
        step = [one for one in self._work if isinstance(one, Train) and one.step == first.step]
        self._train(sum(self._costs.score_s(self._own(one)) for one in step))

    def _train(self, before_s: float) -> None:
        """The next mini-batch, `before_s` seconds after now."""
        work = self._work.popleft()
        assert isinstance(work, Train)
        own = self._own(work)
        seconds = before_s + self._costs.train_s(own)
        tokens = sum(sample.tokens for sample in own)
        trained = Trained(self.rank, 0, work.step, work.minibatch, tokens, seconds, dict(NOTHING_LEARNED))
        self._take("train", seconds, lambda: self._tell(trained))

    def _own(self, work: Train) -> list[Sample]:
        return [sample for sample in work.samples if sample.replica == self._replica]

    def _take(self, phase: str, seconds: float, done: Callable[[], None]) -> None:
        self._busy = True
        self._phases.enter(phase, self._kernel.now)

        def end() -> None:
            done()
            self._next()

        self._kernel.at(self._kernel.now + seconds, end)

    def _published(self, version: int) -> None:
        self._tell(Published(self.rank, 0, version, b"", self._costs.publish_s))
