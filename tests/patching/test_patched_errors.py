"""Layer: gloo ranks, and one real launch. Bad use ends on every rank, with a message, and soon."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from patched import PATIENCE, Case, inputs_of, local_frames, model_of

from launch import launch
from mllm_seqpar import FrameShard, frame_range, patch_model, unpatch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, SeqParError, ShapeError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.runtime.visual_features import fingerprint_of
from ranks import ranks
from tiny import tiny_frames, tiny_model, tiny_text

CASE = Case(frames=(3,), length=12)
SECONDS = 200.0  # below the time limit of the process group, which nothing may wait for
"""For the slowest rank, on a machine that others use; the transport's own timeout is minutes."""

OTHERS = "given different inputs"
"""Every rank sees that they differ."""
ALONE = r"rank 1 of the group failed while checking its arguments"
"""What the ranks see whose own inputs are in order."""


def bad_inputs(name: str, inputs: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What rank 1 (or, where all are wrong, every rank) passes."""
    all_frames = inputs["pixel_values"]
    ids = inputs["input_ids"]
    features = torch.zeros(3, 4, 64)
    own = local_frames(inputs)
    if name.startswith("all:") or rank == 1:
        match name.removeprefix("all:"):
            case "other text":
                return inputs | {"input_ids": ids.flip(1), "labels": inputs["labels"].flip(1)}
            case "longer text":
                return inputs_of("per_head", Case(frames=(3,), length=14), None)
            case "other labels":
                return inputs | {"labels": inputs["labels"] + 1}
            case "no labels":
                return {key: x for key, x in inputs.items() if key != "labels"}
            case "other video":
                return inputs | {"pixel_values": tiny_frames(3, seed=8)}
            case "fewer frames":
                return inputs | {"pixel_values": all_frames[:2]}
            case "other positions":
                return inputs | {"position_ids": torch.arange(1, 13)[None]}
            case "other offsets":
                return inputs | {"media_offset": torch.zeros(1, 12, 2, dtype=torch.long)}
            case "features where others have pixels":
                return {key: x for key, x in inputs.items() if key != "pixel_values"} | {"image_embeds": features}
            case "cache":
                return inputs | {"use_cache": True}
            case "shard where others have all":
                return own
            case "both kinds":
                return inputs | {"image_embeds": features}
            case "no text":
                return {key: x for key, x in inputs.items() if key != "input_ids"}
            case "shard of another rank":
                return own | {"visual_shard": FrameShard(0, 1, 3)}
            case "shard of other length":
                return own | {"pixel_values": all_frames}
            case "shard without frames":
                return {key: x for key, x in own.items() if key != "pixel_values"}
            case "shard as a tuple":
                return own | {"visual_shard": (1, 2, 3)}
            case "features too narrow":
                return {k: x for k, x in inputs.items() if k != "pixel_values"} | {"image_embeds": features[..., :32]}
            case "frames missing":
                return {key: x for key, x in inputs.items() if key != "pixel_values"}
            case "frame too many":
                return inputs | {"pixel_values": tiny_frames(4)}
            case "frames of another size":
                return inputs | {"pixel_values": torch.zeros(3, 3, 42, 42)}
            case "four-dimensional mask":
                return inputs | {"attention_mask": torch.ones(1, 1, 12, 12)}
            case "attentions":
                return inputs | {"output_attentions": True}
            case "not causal":
                return inputs | {"is_causal": False}
            case "weights wanted":
                return inputs | {"use_cache": True, "labels": inputs["labels"]}
        raise AssertionError(name)
    return own if name.startswith("shard") and "others" not in name else inputs


ERRORS: dict[str, tuple[type[Exception], str, str]] = {
    # what rank 1 does alone: its error, its message, the others' message
    "other text": (AgreementError, "checksum of token ids: rank 0 has", OTHERS),
    "longer text": (AgreementError, "text tokens: rank 0 has 12, rank 1 has 14", OTHERS),
    "other labels": (AgreementError, "checksum of labels", OTHERS),
    "no labels": (AgreementError, "labels given: rank 0 has 1, rank 1 has 0", OTHERS),
    "other video": (AgreementError, "checksum of pixels", OTHERS),
    "fewer frames": (AgreementError, "frames: rank 0 has 3, rank 1 has 2, rank 2 has 3", OTHERS),
    "other positions": (AgreementError, "checksum of position ids", OTHERS),
    "other offsets": (AgreementError, "checksum of what says where the frames belong", OTHERS),
    "features where others have pixels": (AgreementError, "kind of frames", OTHERS),
    "cache": (AgreementError, "cache asked for: rank 0 has 0, rank 1 has 1", OTHERS),
    "shard where others have all": (AgreementError, "frames given by visual_shard: rank 0 has 0, rank 1 has 1", OTHERS),
    "both kinds": (ShapeError, "pass either pixel_values or image_embeds, not both", ALONE),
    "no text": (ShapeError, "pass either input_ids or inputs_embeds", ALONE),
    "shard of another rank": (ShapeError, r"rank 1 of 3 holds frames 1 to 2 of 3 .*FrameShard\(start=0", ALONE),
    "shard of other length": (ShapeError, "means 1 frames, 3 were passed", ALONE),
    "shard without frames": (ShapeError, "a rank without frames passes an empty tensor", ALONE),
    "shard as a tuple": (ShapeError, r"expected a FrameShard\(start, stop, total\), got tuple", ALONE),
    "features too narrow": (ShapeError, r"expected \(frames, tokens, 64\)", ALONE),
    "attentions": (ConfigError, "output_attentions=True: attention weights do not exist", ALONE),
    "not causal": (ConfigError, "is_causal=False: the text of a patched model is causal in every layer", ALONE),
    # what all ranks do: every one has the message
    "all:frames missing": (ShapeError, "neither pixel_values nor image_embeds was passed", ""),
    "all:frame too many": (ShapeError, "placeholders for 3 frames .* and 4 were passed", ""),
    "all:frames of another size": (ShapeError, r"pixel_values has shape .*expected \(frames, 3, 28, 28\)", ""),
    "all:four-dimensional mask": (MaskError, r"takes a padding mask of shape \(1, 12\), got \(1, 1, 12, 12\)", ""),
    "all:attentions": (ConfigError, "output_attentions=True", ""),
    "all:weights wanted": (ConfigError, "use_cache: a pass with a cache has no backward pass", ""),
}


def forward_errors(rank: int, world: int, names: list[str]) -> dict[str, tuple[str, str, float]]:
    """Error class, message and seconds of each case; the group must stay usable after each."""
    model = model_of("per_head", CASE)
    patch_model(model)
    found = {}
    for name in names:
        inputs = inputs_of("per_head", CASE, model)
        start = time.monotonic()
        try:
            model(**bad_inputs(name, inputs, rank, world))
            found[name] = ("nothing", "", 0.0)
        except SeqParError as error_:
            found[name] = (type(error_).__name__, str(error_), time.monotonic() - start)
    loss = model(**inputs_of("per_head", CASE, model)).loss.item()
    unpatch_model(model)
    assert loss == loss
    return found


def test_bad_inputs() -> None:
    """All in one go: what one case left in the transport would spoil the next."""
    outcomes = ranks(3).run(forward_errors, list(ERRORS), timeout=PATIENCE)
    for name, (kind, message, others) in ERRORS.items():
        for rank, outcome in enumerate(outcomes):
            found, text, seconds = outcome[name]
            assert seconds < SECONDS
            if rank == 1 or name.startswith("all:"):
                assert found == kind.__name__ and re.search(message, text), (name, rank, found, text)
            else:
                assert found == "AgreementError" and re.search(others, text), (name, rank, found, text)


def test_frames_are_told_apart_by_the_same_values_however_they_lie_in_memory() -> None:
    frames = torch.randn(7, 33, 50, 3).permute(0, 3, 1, 2)
    assert fingerprint_of(frames) == fingerprint_of(frames.contiguous()) != fingerprint_of(frames + 1)


ALONE_BY_MISTAKE = r"=4, so a launcher started 4 processes, but .*init_process_group.*PartialState.*group=\"self\""


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "4", "RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        {"PMI_SIZE": "4", "PMI_RANK": "1"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_launched_processes_without_a_process_group_are_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for attempt in (lambda: patch_model(model), lambda: frame_range(8)):
        with pytest.raises(ConfigError, match=ALONE_BY_MISTAKE):
            attempt()
    assert patch_of(patch_model(model, group="self")) and frame_range(8, "self") == range(8)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "RANK": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},  # torchrun inside of srun
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the script of sbatch, which runs once
        {"WORLD_SIZE": "4"},  # no process has a rank
    ],
)
def test_single_processes_need_no_process_group(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert frame_range(8) == range(8)


def test_process_group_made_after_patching_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torch.multiprocessing, which says nothing of its processes before they join."""
    models = patch_model(tiny_model()), patch_model(tiny_model(), group="self")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    ids, frames = tiny_text(2), tiny_frames(2)
    with pytest.raises(ConfigError, match="patched for one process, before the process group of 2 ranks existed"):
        models[0](ids, frames)
    models[1](ids, frames)


def _differently(model: Any, what: str, rank: int) -> Any:
    """Runs a pass in which rank 1 does something else."""
    ids, frames = tiny_text(2), tiny_frames(2)
    more: dict[str, Any] = {}
    if rank == 1:
        match what:
            case "training mode":
                model.train()
            case "gradient checkpointing":
                model.gradient_checkpointing_enable()
            case "checksum of which parameters train":
                model.requires_grad_(False)
            case "num_items_in_batch":
                more = {"num_items_in_batch": 3}
            case "checksum of further arguments":
                more = {"output_hidden_states": True}
            case "checksum of the inputs' dtypes":
                frames = frames.double()
            case "stopping_criteria":
                more = {"stopping_criteria": [lambda *_: True]}
    if what == "stopping_criteria":
        return model.generate(ids, pixel_values=frames, max_new_tokens=2, pad_token_id=0, streamer=None, **more)
    with torch.autocast("cpu", torch.bfloat16, enabled=what.startswith("autocast") and rank == 1):
        return model(ids, frames, labels=ids, **more)


@pytest.mark.parametrize(
    "what",
    [
        "training mode",
        "gradient checkpointing",
        "checksum of which parameters train",
        "num_items_in_batch",
        "checksum of further arguments",
        "checksum of the inputs' dtypes",
        "autocast",
        "stopping_criteria",
    ],
)
def test_ranks_that_compute_differently_are_told(what: str) -> None:
    """They would compute another loss each, or send each other what the other does not wait for."""
    models = [tiny_model() for _ in range(2)]
    found: dict[int, str] = {}

    def run(comm: Any) -> None:
        patch_model(models[comm.rank], group=comm)
        with pytest.raises(AgreementError) as error:
            _differently(models[comm.rank], what, comm.rank)
        found[comm.rank] = str(error.value)

    run_loopback(2, run, timeout=SECONDS)
    assert all(what in found[rank] for rank in range(2)), found


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"pixel_valuez": tiny_frames(2)}, ConfigError, "forward: unknown argument pixel_valuez"),
        ({"position_ids": torch.arange(11)[None]}, ShapeError, r"position_ids: has shape \(1, 11\)"),
        ({"position_ids": torch.arange(12)}, ShapeError, r"position_ids: has shape \(12,\)"),
        ({"labels": torch.zeros(1, 12)}, ShapeError, "labels: has dtype torch.float32; expected integers"),
        ({"input_ids": tiny_text(2)[0]}, ShapeError, r"input_ids: has shape \(12,\); expected 2 dimensions"),
    ],
)
def test_arguments_that_nothing_reads_or_that_do_not_fit(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given = {"input_ids": tiny_text(2), "pixel_values": tiny_frames(2)} | arguments
    with pytest.raises(kind, match=message):
        patch_model(tiny_model())(**given)


def patch_errors(rank: int, world: int, what: str) -> None:
    overrides: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if rank == 1:
        if what == "other options":
            options = {"text_layout": "striped"}
        elif what == "unknown option":
            options = {"text_lay_out": "striped"}
        elif what == "other model":
            overrides = {"intermediate_size": 112}
        elif what == "frozen otherwise":
            overrides = {"frozen": True}
    frozen = overrides.pop("frozen", False)
    model = torch.nn.Linear(2, 2) if what == "no model" and rank == 1 else tiny_model("per_head", **overrides)
    if frozen:
        model.requires_grad_(False)
    start = time.monotonic()
    try:
        patch_model(model, **options)
    finally:
        assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize(
    ("what", "own", "others"),
    [
        (
            "other options",
            "disagree.*rank 0: .*zigzag.*rank 1: .*striped",
            "disagree.*rank 0: .*zigzag.*rank 1: .*stri",
        ),
        ("unknown option", "unknown option text_lay_out", ALONE),
        ("no model", "no adapter knows", ALONE),
        ("other model", "the ranks of the group disagree", "the ranks of the group disagree"),
        ("frozen otherwise", "the ranks of the group disagree", "the ranks of the group disagree"),
    ],
)
def test_ranks_that_patch_differently(what: str, own: str, others: str) -> None:
    errors = ranks(2).errors(patch_errors, what, timeout=PATIENCE)
    for error, message in zip(errors, (others, own), strict=True):
        assert isinstance(error, SeqParError)
        with pytest.raises(SeqParError, match=f"(?s){message}"):
            raise error


def attention_dropout(rank: int, world: int) -> None:
    model = tiny_model("per_head", attention_dropout=0.1).train()
    patch_model(model)
    inputs = inputs_of("per_head", CASE, model)
    for arguments in ({}, {"use_cache": True}):
        with pytest.raises(ConfigError, match="attention_dropout=0.1: dropout on attention weights is not supported"):
            model(**inputs, **arguments)
    model.eval()
    model(**inputs)  # no dropout there


def test_attention_dropout() -> None:
    ranks(2).run(attention_dropout, timeout=PATIENCE)


KILLED = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
import torch, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher would at times be the first to end rank 0
torch.set_num_threads(1)
from tiny import tiny_frames, tiny_model, tiny_text
from mllm_seqpar import patch_model

dist.init_process_group("gloo")
model = tiny_model("per_head").train()
patch_model(model)
ids = tiny_text(3)
for step in range(1000):
    if step == 3 and dist.get_rank() == 1:
        print("killed at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(ids, tiny_frames(3), labels=ids).loss.backward()
    except Exception as error:
        print(f"rank {{dist.get_rank()}} ended at {{time.time()}}: {{type(error).__name__}}: {{error}}", flush=True)
        raise
"""


@pytest.mark.launch
def test_a_rank_killed_in_training(tmp_path: Path) -> None:
    """The others end by themselves, with a message.

    tests/training/test_finetune.py has the same under FSDP2.
    """
    here = Path(__file__).resolve().parent
    script = tmp_path / "train.py"
    script.write_text(KILLED.format(paths=[str(here.parent), str(here.parent.parent)]))
    done = launch(2, script)
    assert done.returncode != 0
    assert "killed at" in done.output
    killed = float(done.output.split("killed at ")[1].split()[0])
    assert "rank 0 ended at" in done.output, done.output
    ended = float(done.output.split("rank 0 ended at ")[1].split(":")[0])
    assert ended - killed < 60
    assert "Another rank of the group has most likely ended" in done.output
