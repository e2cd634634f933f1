"""vLLM by itself: the measure of what the rollout's loop around it costs.

A worker process like the engine's, driven by the same messages, in which `vllm.LLM.generate` does all the work at once:
no streaming, no steps of our own, weights from the checkpoint. It takes `batch.prompts * batch.group_size` trajectories,
generates them, and answers with one `EngineOutput`.
"""

from __future__ import annotations

import time

import numpy as np

from laminar_hpc.config.model_files import read_end_tokens
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.keyed import stable_hash
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.peer import AddTrajectory, Ended, EngineOutput, EngineUp, StartEngine
from laminar_hpc.protocol.trajectory import Block, Source, Stop
from laminar_hpc.rollout.vllm_setup import engine_arguments, has_gpus, prepare_process

OURS = ("load_format", "worker_extension_cls", "disable_log_stats")
"""Engine arguments that only our weights and our statistics need."""


def main(channel: Channel) -> None:
    """Serve until the driver is gone; the first message is `StartEngine`."""
    start = channel.receive(None)
    if not isinstance(start, StartEngine):
        raise ProtocolError(f"bare vllm: the first message must be StartEngine, got {type(start).__name__}")
    config = Config.model_validate_json(start.config)
    began_s = time.perf_counter()
    prepare_process(config, start.device)
    import torch
    from vllm import LLM

    torch.set_num_threads(config.job.threads)
    arguments = {key: value for key, value in engine_arguments(config, has_gpus()).items() if key not in OURS}
    model = LLM(**arguments)
    channel.send(EngineUp(config.rollout.concurrency, time.perf_counter() - began_s))
    while True:
        batch = [_receive(channel) for _ in range(config.batch.prompts * config.batch.group_size)]
        channel.send(_generate(model, config, batch))


def _receive(channel: Channel) -> AddTrajectory:
    message = channel.receive(None)
    if not isinstance(message, AddTrajectory):
        raise ProtocolError(f"bare vllm: unexpected {type(message).__name__}")
    return message


def _generate(model: object, config: Config, batch: list[AddTrajectory]) -> EngineOutput:
    from vllm import SamplingParams

    began_s = time.perf_counter()
    prompts = [{"prompt_token_ids": np.frombuffer(one.prompt, "<i4").tolist()} for one in batch]
    parameters = [
        SamplingParams(
            temperature=config.rollout.temperature,
            seed=stable_hash(one.spec.seed, 0),  # the engine's, so that both sides generate the same tokens
            max_tokens=config.rollout.max_response_tokens,
            stop_token_ids=sorted(read_end_tokens(config.model.path)),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        for one in batch
    ]
    blocks, ended = [], []
    for one, output in zip(batch, model.generate(prompts, parameters, use_tqdm=False), strict=True):  # type: ignore[attr-defined]
        [completion] = output.outputs
        tokens = np.asarray(completion.token_ids, "<i4").tobytes()
        logprobs = [completion.logprobs.logprobs[start] for start in completion.logprobs.start_indices]
        block = Block(
            one.spec.id, len(one.prompt) // 4, Source.MODEL, None, tokens, np.asarray(logprobs, "<f4").tobytes()
        )
        blocks.append(block)
        stop = Stop.LENGTH if completion.finish_reason == "length" else Stop.END_TOKEN
        ended.append(Ended(one.spec.id, stop))
    return EngineOutput(blocks, ended, 0.0, 0, 0, time.perf_counter() - began_s)
