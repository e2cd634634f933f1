"""Whole runs in which vLLM generates and Megatron-core trains: what the two compute agrees, in the record."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from laminar_command import Laminar
from test_run import finished, loaded_what_was_published, replayed

from laminar_hpc.policy.modes import MODES
from laminar_hpc.record.reader import Run

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.job, pytest.mark.vllm, pytest.mark.megatron]

VLLM = {"engine": "vllm", "eager": True, "timeout_s": 300}

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 over characters, with heads of a size that vLLM's kernels have."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from laminar_hpc.trainer.tiny import END_ID, character_tokenizer

    directory = tmp_path_factory.mktemp("real") / "model"
    tokenizer = character_tokenizer()
    torch.manual_seed(4)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=END_ID,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def metric(run: Run, name: str) -> dict[int, float]:
    """A metric by step."""
    rows = run.table("step_metrics")
    return {int(row["step"]): float(row["value"]) for row in rows[rows["name"] == name.encode()]}


def same_numbers(run: Run, steps: int, mean: float) -> None:
    """On tokens of the version that the trainer held, its log-probabilities are those that vLLM recorded."""
    differences = metric(run, "mismatch_mean")
    assert 1 in differences  # the first step always trains on what the first version generated
    assert set(differences) <= set(range(1, steps + 1))
    assert max(differences.values()) < mean
    assert min(metric(run, "mismatch_correlation").values()) > 0.99
    assert min(metric(run, "mismatch_tokens").values()) > 0


@pytest.mark.parametrize(("tensor", "pipeline", "shards"), [(2, 1, 1), (1, 2, 2)])
def test_two_shards_train_what_vllm_generates(laminar: Laminar, tensor: int, pipeline: int, shards: int) -> None:
    """Trainers that share matrices or layers, and an engine on one or on two processes."""
    run = finished(
        laminar,
        job={"trainers": 2, "rollouts": 1, "start_timeout_s": 600},
        rollout={**VLLM, "tensor_parallel": shards},
        trainer={
            "engine": "megatron",
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,  # changes weights, whatever the rewards are
        },
        control={"mode": "sync", "steps": 2},
        batch={"prompts": 4, "group_size": 4, "minibatches": 2},
        evaluation={"every": 2, "prompts": 4},
    )
    loaded_what_was_published(run, versions=3)
    replayed(run)
    same_numbers(run, steps=2, mean=1e-3)
    assert np.all(run.table("steps")["staleness_consumption_max"] == 0)


def test_vllm_hands_trajectories_over_and_goes_on_with_them(laminar: Laminar) -> None:
    run = finished(
        laminar,
        job={"rollouts": 2, "start_timeout_s": 600},
        rollout={
            **VLLM,
            "concurrency": 16,
            "slots": 16,
            "max_response_tokens": 300,
            "stream_interval_s": 0.02,
        },
        trainer={"engine": "megatron", "learning_rate": 0.0},
        repack={"every_s": 0.1, "batch": 16, "gain_gate": False},
        control={"steps": 1, "ahead": 0.0},
        batch={"prompts": 24},  # under one version, at most 4 at once to a rollout
        evaluation={"every": 0},
    )
    replayed(run)
    moves = run.table("moves")
    done = moves[moves["ending"] == b"moved"]
    assert len(done) > 0
    assert np.all(done["resumed_s"] > done["handed_over_s"])
    same_numbers(run, steps=1, mean=1e-3)  # what was moved has the log-probabilities of the policy it was sampled from


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_runs_on_vllm(laminar: Laminar, mode: str) -> None:
    run = finished(
        laminar,
        job={"rollouts": 2, "start_timeout_s": 600},
        rollout={
            **VLLM,
            "concurrency": 8,
            "slots": 8,
            "max_response_tokens": 150,
            "stream_interval_s": 0.02,
        },
        trainer={"engine": "megatron", "learning_rate": 1e-3, "weight_decay": 0.1},
        control={"mode": mode, "steps": 4, "max_staleness": 2},
        batch={"prompts": 4, "group_size": 4, "minibatches": 2},
        evaluation={"every": 4, "prompts": 4},
    )
    assert list(run.table("steps")["step"]) == [1, 2, 3, 4]
    loaded_what_was_published(run, versions=5)
    replayed(run)
    rows = run.table("trajectories")
    assert np.any(rows["spans"] > 1) == MODES[mode].mixes
    bound = msgspec.json.decode(run.metadata["staleness_bound"])
    assert bound is None or np.all(run.table("steps")["staleness_consumption_max"] <= bound)


@pytest.mark.slow
def test_a_real_model_does_three_steps(tmp_path: Path) -> None:
    """The config that ships: SmolLM2-135M on two cores."""
    command = Laminar(tmp_path, tmp_path / "smollm2")
    made = command("model", "smollm2", tmp_path / "smollm2")
    assert made.returncode == 0, made.stderr
    options = ["--set", f"model.path={tmp_path / 'smollm2'}", "--set", f"run_dir={command.run_dir}"]
    done = command("run", CONFIGS / "smollm2-cpu.toml", *options, deadline_s=3 * 900)
    assert done.returncode == 0, done.stdout + done.stderr
    from laminar_hpc.record.reader import open_run

    run = open_run(str(command.run_dir))
    assert len(run.files) == 5
    assert list(run.table("steps")["step"]) == [1, 2, 3]
    loaded_what_was_published(run, versions=4)
    same_numbers(run, steps=3, mean=1e-3)
