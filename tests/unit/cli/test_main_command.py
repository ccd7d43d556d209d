"""Layer: one process. The command `mllm-seqpar`: its table, completion, convert and doctor."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mllm_seqpar import __main__, __version__, _compat
from mllm_seqpar.__main__ import main
from mllm_seqpar.cli import completion, doctor, exactness, launch, program_exit
from mllm_seqpar.cli.commands import COMMANDS, Command
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.runtime import visual_tokens


def test_help_lists_the_commands_and_an_unknown_one_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["help"]):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {name} " in shown and command.text in shown for name, command in COMMANDS.items())
        assert "finetune, ask, chat, serve, calibrate and doctor start N ranks" in shown
        assert "examples:\n  mllm-seqpar doctor" in shown
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"mllm-seqpar {__version__}\n"
    assert main(["fintune", "--model", "x"]) == 2
    expected = "error: 'fintune' is not a command; did you mean finetune?; mllm-seqpar --help lists them\n"
    assert capsys.readouterr().err == expected


def test_exit_status_and_the_arguments_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(program_exit, "measured", lambda argv: calls.append(argv) or 7, raising=False)
    entry = "mllm_seqpar.cli.program_exit:measured"
    monkeypatch.setattr(__main__, "COMMANDS", {"some-thing": Command(entry, ""), "ask": Command(entry, "", "here")})
    assert main(["some_thing", "--a-b", "c"]) == 7
    assert main(["ask", "--a", "--num_processes", "1", "--b", "-1"]) == 7  # one process starts no ranks
    assert main(["ask", "--num-processes=4", "--help"]) == 7
    assert calls == [["--a-b", "c"], ["--a", "--b", "-1"], ["--help"]]


@pytest.mark.slow
def test_help_and_plan_import_no_torch_and_shells_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from mllm_seqpar.__main__ import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    plan = ["plan", "--model", "mplug-owl3-7b", "--cluster", "a100-80g-4x4", "--frames", "64", "--text", "128"]
    for argv in (["--help"], [*plan, "--gpus", "16"]):
        subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True)
    for shell in completion.SHELLS:
        assert main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
        if shutil.which(shell):
            subprocess.run([shell, "-n", tmp_path / shell], check=True)
    (tmp_path / "some model").mkdir()
    (tmp_path / "some file").touch()

    def completed(*words: str) -> set[str]:
        line = f"COMP_WORDS=({' '.join(words)} '') COMP_CWORD={len(words) - 1}"
        code = f"source ./bash; {line}; _shtab_mllm_seqpar; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        return {*subprocess.check_output(["bash", "-c", code], text=True, cwd=tmp_path).splitlines()}

    assert completed("mllm-seqpar", "c") == {"chat", "check-data", "configs", "convert", "calibrate", "completion"}
    assert completed("mllm-seqpar", "chat", "--mlp") == {"--mlp_chunk_size"}
    assert completed("mllm-seqpar", "finetune", "--adam_ep") == {"--adam_epsilon"}  # of --help_all
    assert completed("mllm-seqpar", "ask", "--self_attention", "s") == {"star"}
    assert completed("mllm-seqpar", "plan", "--trained", "''") == {"all", "no-vision", "language", "connector", "none"}
    assert "a100-80g-4x4" in completed("mllm-seqpar", "plan", "--cluster", "a1")
    assert completed("mllm-seqpar", "chat", "--model", "so") == {"some model"}  # the directory, not the file
    assert completed("mllm-seqpar", "ask", "--video", "some") == {"some model", "some file"}
    assert not completed("mllm-seqpar", "ask", "--seed", "so") - {""}


def test_convert_writes_safetensors_also_of_pickled_weights(
    inference_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, weights = tmp_path / "published", load_file(inference_files / "gated/model.safetensors")
    published.mkdir()
    for file in (inference_files / "gated").iterdir():
        if file.suffix != ".safetensors":
            (published / file.name).write_bytes(file.read_bytes())
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        torch.save({name: weights[name] for name in part}, published / f"pytorch_model-{number}.bin")
    (published / "pytorch_model.bin.index.json").write_text("{}")
    (tmp_path / "new" / "bfloat16").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "new" / "bfloat16")  # to an empty directory
    for dtype, output in (("auto", tmp_path / "new" / "auto"), ("bfloat16", tmp_path / "link")):
        assert main(["convert", "--model", str(published), "--output", str(output), "--dtype", dtype]) == 0
        kind = torch.float32 if dtype == "auto" else torch.bfloat16
        assert str(kind).removeprefix("torch.") in capsys.readouterr().out
        found = load_model(str(output), dtype="auto").state_dict()
        original = load_model(str(inference_files / "gated")).state_dict()
        assert found.keys() == original.keys()
        assert all(torch.equal(found[name], x.to(kind)) for name, x in original.items())
        assert load_processor(str(output)).saved_options == load_processor(str(published)).saved_options
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["auto", "bfloat16"]


REFUSED = [
    ("completion", ["tcsh"], "invalid choice: 'tcsh'"),
    ("convert", [], "nothing to convert: give --model, or for OpenFlamingo --language_model and --vision_model"),
    ("convert", ["--language_model", "x"], "nothing to convert"),
    ("convert", ["--model", "x", "--checkpoint", "y"], "--checkpoint y would have no effect: --model names a whole"),
    ("convert", ["--model", "nowhere"], "--model nowhere: no config.json there"),
    ("convert", ["--model", "x", "--dtype", "int8"], "--dtype: 'int8' is not allowed"),
    ("convert", ["--language_model", "nowhere", "--vision_model", "nowhere"], "nowhere"),
    ("convert", ["--model", "llava"], "LlavaForConditionalGeneration (model_type 'llava') does not belong to a suppor"),
    ("convert", ["--language_model", "clip", "--vision_model", "clip"], "'clip'; OpenFlamingo supports gpt_neox"),
    ("convert", ["--model", "x", "--output", "llava"], "it exists and is not an empty directory"),
    ("example", ["--output", "/dev/null/new"], "--output /dev/null/new: cannot be created (File exists); choose"),
    ("example", ["--output", "llava"], "exists and is not an empty directory; choose another name"),
    ("check-data", ["none.jsonl"], "none.jsonl: cannot be read (No such file or directory)"),
    ("check-data", ["a.jsonl", "--workers", "0"], "--workers: 0 is not allowed"),
    ("check-data", ["a.jsonl", "--fps", "1", "--num-frames", "3"], "--fps: 1, but num_frames is 3; give one of them"),
    ("check-data", ["a.jsonl", "--max-length", "3"], "--max_length needs --model"),
    ("check-data", ["a.jsonl", "--store_size", "8"], "--store_size 8 would have no effect: it belongs to --store DIR"),
    ("check-data", ["a.jsonl", "--store", "s", "--frame_store", "t"], "--frame_store t would have no effect: --store"),
    ("check-data", ["--fps", "1"], "the following arguments are required: DATA"),
    ("check-data", ["a.jsonl", "--model", "nowhere"], "--model nowhere: no config.json there"),
]


@pytest.mark.parametrize(("command", "argv", "message"), REFUSED)
def test_wrong_options_and_inputs_take_one_line_and_leave_no_file(
    command: str,
    argv: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("llava", "clip"):  # other families
        Path(kind).mkdir()
        Path(kind, "config.json").write_text(json.dumps({"model_type": kind}))
    before = sorted(tmp_path.rglob("*"))
    if command == "convert" and "--output" not in argv:
        argv = ["--output", "new", *argv]
    assert main([command, *argv]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_doctor_finds_old_packages_and_wrong_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, alone = torch.device("cpu"), as_communicator("self")
    found = list(doctor.exactness(alone, cpu))
    assert [finding.ok for finding in found] == [None, True, True, True, True, None]
    lv_xattn, move = exactness.lv_xattn, visual_tokens._move
    monkeypatch.setattr(exactness, "lv_xattn", lambda *args, group: lv_xattn(*args, group=group, scale=0.2))
    wrong = list(doctor.exactness(alone, cpu))[1]
    assert str(wrong).startswith("WRONG exactness    attention lv-xattn, float32: relative error ")
    # One embedding of each rank goes to another row.
    monkeypatch.setattr(
        visual_tokens, "_move", lambda comm, sends, *given: move(comm, [x.roll(1) for x in sends], *given)
    )
    verdicts = [finding.ok for finding in doctor.exactness(alone, cpu)]
    assert verdicts == [None, False, True, True, False, None]
    monkeypatch.setitem(_compat.MINIMUM, "torch", "99.1")
    monkeypatch.setattr(doctor, "exactness", lambda comm, device: iter([]))
    assert doctor.doctor(["--num_processes", "1"]) == 1
    shown = capsys.readouterr().out
    assert "WRONG torch" in shown and "99.1 or later is needed: pip install --upgrade 'torch>=99.1'" in shown
    assert "host memory" in shown and "kernel" in shown


def test_failing_rank_writes_the_file_that_the_launcher_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(program_exit.os, "_exit", statuses.append)
    monkeypatch.setattr(program_exit.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    program_exit._exit_now("stopped: another rank ended", 1)
    assert not list(tmp_path.iterdir())  # this rank is not the cause
    program_exit._exit_now("error: --fps: 0", 2)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "error: --fps: 0" and int(message["extraInfo"]["timestamp"]) > 1e9
    assert statuses == [1, 2]


def test_rank_that_ends_first_ends_the_program_only_if_it_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(launch.os, "_exit", statuses.append)
    monkeypatch.setattr(launch, "GRACE", 0.0)
    ranks = launch._OtherRanks(1, [], {}, lambda: None)
    for status in (0, -9):
        process: Any = SimpleNamespace(wait=lambda status=status: status)
        ranks._watch(3, process)
    assert statuses == [1]
    assert capsys.readouterr().err.startswith(
        "\nstopped: rank 3 ended by signal 9 (SIGKILL); it may have run out of memory"
    )
    for count, message in ((0, ": 0 is not allowed"), (9999, r" 9999: this machine has \d+ processors and \d+ GPUs")):
        with pytest.raises(ConfigError, match=f"--num_processes{message}"), launch.own_ranks(count, "a:b", []):
            pass
