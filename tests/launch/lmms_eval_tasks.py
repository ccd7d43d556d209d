"""A folder with two tiny tasks of lmms-eval about local videos: one generates, one chooses among options."""

import json
from pathlib import Path
from typing import Any

YAML = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_visual: !function utils.visual
doc_to_text: !function utils.text
doc_to_target: {target}
"""

GENERATES = """generation_kwargs: {max_new_tokens: 6, temperature: 0, do_sample: false}
process_results: !function utils.same
metric_list:
  - metric: same
    aggregation: mean
    higher_is_better: true
"""

CHOOSES = """doc_to_choice: ["A", "B", "C"]
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""

UTILS = """def visual(doc):
    return [doc["video"]]


def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def same(doc, results):
    return {"same": float(results[0] == doc["answer"].strip())}
"""


def write_tasks(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write `tiny_open` and `tiny_choice` about rows with video, question, answer and letter (a number)."""
    data = folder / "rows.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, target, rest in (
        ("tiny_open", "generate_until", "answer", GENERATES),
        ("tiny_choice", "multiple_choice", "letter", CHOOSES),
    ):
        (folder / f"{name}.yaml").write_text(YAML.format(name=name, kind=kind, target=target, data=data) + rest)
    (folder / "utils.py").write_text(UTILS)
    return folder
