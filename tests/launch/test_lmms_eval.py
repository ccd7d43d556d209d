"""Layer: real launch. The evaluator of lmms-eval with this package's model, on groups of ranks; skipped without it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lmms_eval_tasks import write_tasks

from family_directories import MAKERS, family_folder
from launch import HANG
from mllm_seqpar import patch_model
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.data import VideoSource
from mllm_seqpar.inference import Conversation, Sampling
from mllm_seqpar.inference.choices import continuation
from mllm_seqpar.models.loading import load_model, load_processor

pytest.importorskip("lmms_eval")
pytestmark = [pytest.mark.launch, pytest.mark.slow]

QUESTIONS = ("What is it?", "Why?", "Where?")
MODELS = ("gated", "moss_vl", *(name for name in MAKERS if name.startswith("qwen")))


def directory(folder: Path, name: str) -> Path:
    return family_folder() / name if name in MAKERS else folder / name


def expected(folder: Path, model_path: Path) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Return rows with the answers of one process, and the negative log-likelihood of each letter."""
    processor = load_processor(str(model_path))
    model = patch_model(load_model(str(model_path)).eval(), group=as_communicator("self"))
    rows, scores = [], []
    for number, question in enumerate(QUESTIONS * 2):
        path = str(folder / ("clip.mp4", "twin.mp4")[number % 2])
        conversation = Conversation(model, processor, [VideoSource.open(path, num_frames=3)])
        content = [{"type": "video"}, {"type": "text", "text": question}]
        prompt = conversation.prompt([{"role": "user", "content": content}])
        answer = conversation.answer(prompt, Sampling(max_new_tokens=6)).text
        ids = prompt.input_ids[0].tolist()
        found = conversation.log_likelihoods(prompt, [continuation(processor.tokenizer, ids, x) for x in "ABC"])
        scores.append([-score.log_likelihood for score in found])
        best = min(range(3), key=scores[-1].__getitem__)
        letter = best if number else (best + 1) % 3  # the first is wrong
        rows.append({"video": path, "question": question, "answer": answer, "letter": letter})
    return rows, scores


def evaluate(tasks: Path, *options: Any, processes: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run lmms-eval; return its results and the samples of the one task, by document."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m"]
    command = [sys.executable, "-m", *(launcher if processes > 1 else []), "lmms_eval", "--model", "mllm_seqpar"]
    command += ["--device", "cpu"]
    command += ["--include_path", tasks, "--batch_size", 1, "--log_samples", "--output_path", tasks / "out", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tasks / "cache"), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=2 * HANG, env=environment)
    files = {path.name.partition("_")[2]: path for path in (tasks / "out").rglob("*.json*")}
    assert done.returncode == 0 and files, done.stdout[-3000:] + done.stderr[-6000:]
    samples = [path for name, path in files.items() if "samples" in name]
    results = next(path for name, path in files.items() if "results" in name)
    lines = [json.loads(line) for line in samples[0].read_text().splitlines()]
    return json.loads(results.read_text())["results"], sorted(lines, key=lambda line: line["doc_id"])


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_ranks_answer_the_documents_of_all_their_ranks(
    inference_files: Path, tmp_path: Path, name: str
) -> None:
    path = directory(inference_files, name)
    rows, scores = expected(inference_files, path)
    arguments = f"pretrained={path},num_frames=3,encode_batch=2"
    tasks = write_tasks(tmp_path, rows)
    options = ("--tasks", "tiny_open", "--model_args", f"{arguments},sp=2")
    results, samples = evaluate(tasks, *options, processes=4)
    assert [sample["doc_id"] for sample in samples] == [*range(len(rows))]
    assert results["tiny_open"]["same,none"] == 1.0, samples


@pytest.mark.parametrize("name", MODELS)
def test_options_are_scored_by_their_likelihood(inference_files: Path, tmp_path: Path, name: str) -> None:
    path = directory(inference_files, name)
    rows, scores = expected(inference_files, path)
    arguments = f"pretrained={path},num_frames=3,encode_batch=2"
    tasks = write_tasks(tmp_path, rows)
    options = ("--tasks", "tiny_choice", "--force_simple", "--model_args", arguments)
    results, samples = evaluate(tasks, *options, processes=1)
    assert results["tiny_choice"]["acc,none"] == pytest.approx(1 - 1 / len(rows))
    found = [[float(value) for value, _ in sample["filtered_resps"]] for sample in samples]
    assert found == [pytest.approx(row, abs=1e-4) for row in scores]
