"""From the blocks of trajectories to padded arrays: what a trainer's worker does before torch comes in."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import TrainOn
from laminar_hpc.protocol.trajectory import Block, Source
from laminar_hpc.trainer.advantages import group_advantages
from laminar_hpc.trainer.api import Sequence


class PaddedBatch(msgspec.Struct, frozen=True):
    """B sequences, padded on the right to the longest one, L tokens; padded places have token 0 and are not trained on.

    `advantages` and `same_version` (B,): one entry a sequence; the latter says that the trainer's weights as they are have
    generated it. The other arrays are (B, L). `proximal_logprobs` and `reference_logprobs` are None where no sequence has
    any.
    """

    tokens: NDArray[np.int64]
    behaviour_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    same_version: NDArray[np.bool_]
    proximal_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None


def own_sequences(message: TrainOn) -> list[Sequence]:
    """The sequences that `message` gives to this trainer, in the order of `message.own`.

    Advantages are taken over whole groups, wherever their members are trained. ProtocolError where a trajectory is not
    among the mini-batch's samples, or its blocks do not fit together.
    """
    advantages = dict(
        zip(message.trajectories, group_advantages(message.groups, message.rewards), strict=True),
    )
    if len(message.own) != len(message.blocks):
        raise ProtocolError(
            f"train on step {message.step}: {len(message.own)} trajectories, but blocks of {len(message.blocks)}"
        )
    sequences = []
    for trajectory, blocks in zip(message.own, message.blocks, strict=True):
        if trajectory not in advantages:
            raise ProtocolError(f"train on step {message.step}: trajectory {trajectory} has no reward")
        sequences.append(assemble(trajectory, blocks, advantages[trajectory]))
    return sequences


def assemble(trajectory: int, blocks: list[Block], advantage: float) -> Sequence:
    """The blocks of one trajectory, in any order, as one sequence.

    ProtocolError names the trajectory where blocks leave a gap, overlap, belong to another trajectory, lack the
    log-probabilities of the model's tokens, or begin without a prompt.
    """
    ordered = sorted(blocks, key=lambda block: block.offset)
    end = 0
    for block in ordered:
        _check_block(trajectory, block, end)
        end = block.end
    if not ordered:
        raise ProtocolError(f"trajectory {trajectory}: no blocks")
    tokens = np.frombuffer(b"".join(block.tokens for block in ordered), dtype="<i4").astype(np.int64)
    logprobs = np.zeros(end, dtype=np.float32)
    mask = np.zeros(end, dtype=np.bool_)
    for block in ordered:
        if block.source is Source.MODEL:
            logprobs[block.offset : block.end] = np.frombuffer(block.logprobs, dtype="<f4")
            mask[block.offset : block.end] = True
    versions = {block.version for block in ordered if block.source is Source.MODEL}
    version = versions.pop() if len(versions) == 1 else None
    return Sequence(tokens=tokens, behaviour_logprobs=logprobs, loss_mask=mask, advantage=advantage, version=version)


def _check_block(trajectory: int, block: Block, end: int) -> None:
    where = f"trajectory {trajectory}: block at offset {block.offset}"
    if block.trajectory != trajectory:
        raise ProtocolError(f"{where} belongs to trajectory {block.trajectory}")
    if block.offset != end:
        kind = "overlaps" if block.offset < end else "leaves a gap after"
        raise ProtocolError(f"{where} {kind} the tokens before it, which end at {end}")
    if block.source is Source.MODEL and len(block.logprobs) != len(block.tokens):
        raise ProtocolError(f"{where} has {block.count} tokens, but {len(block.logprobs) // 4} log-probabilities")
    if block.source is Source.MODEL and block.offset == 0:
        raise ProtocolError(f"{where}: the model's first token has no token before it to be predicted from")


def micro_batches(sequences: list[Sequence], max_tokens: int) -> list[list[Sequence]]:
    """Cut `sequences` into micro-batches of at most `max_tokens` padded tokens (number times longest).

    Sequences of like length come together, longest first, so that little is padded; a sequence longer than `max_tokens`
    makes a micro-batch alone. The cut is a function of the lengths and their order alone.
    """
    batches: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.tokens)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].tokens) <= max_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


def pad(sequences: list[Sequence], version: int | None = None) -> PaddedBatch:
    """These sequences as arrays (B, L), padded on the right; `version` is that of the trainer's weights (None: unknown)."""
    return PaddedBatch(
        tokens=_rows([sequence.tokens for sequence in sequences], np.int64),
        behaviour_logprobs=_rows([sequence.behaviour_logprobs for sequence in sequences], np.float32),
        loss_mask=_rows([sequence.loss_mask for sequence in sequences], np.bool_),
        advantages=np.array([sequence.advantage for sequence in sequences], dtype=np.float32),
        same_version=np.array(
            [version is not None and sequence.version == version for sequence in sequences], dtype=np.bool_
        ),
        proximal_logprobs=_scores([sequence.proximal_logprobs for sequence in sequences]),
        reference_logprobs=_scores([sequence.reference_logprobs for sequence in sequences]),
    )


def unpad(
    sequences: list[Sequence], parts: list[list[Sequence]], rows: list[NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    """For each of `sequences` its row, float32 (T,), from the arrays (B, L) of the micro-batches `parts`; without one, 0."""
    values = {id(sequence): np.zeros(len(sequence.tokens), dtype=np.float32) for sequence in sequences}
    for part, array in zip(parts, rows, strict=True):
        for sequence, row in zip(part, array, strict=True):
            values[id(sequence)] = row[: len(sequence.tokens)].copy()
    return [values[id(sequence)] for sequence in sequences]


def count_trained(sequences: list[Sequence]) -> tuple[int, int]:
    """How many of these sequences have a token to train on, and how many such tokens there are."""
    lengths = [int(sequence.loss_mask.sum()) for sequence in sequences]
    return sum(length > 0 for length in lengths), sum(lengths)


def _scores(arrays: list[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    present = [array for array in arrays if array is not None]
    if len(present) not in (0, len(arrays)):
        raise ValueError(f"all sequences of a micro-batch must be scored, or none, got {len(present)} of {len(arrays)}")
    return _rows(present, np.float32) if present else None


def _rows(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """One row each (B, L), with zeros on the right."""
    rows = np.zeros((len(arrays), max(map(len, arrays))), dtype=dtype)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return rows
