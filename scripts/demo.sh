#!/usr/bin/env bash
# Demonstrate training and inference on a CPU machine: make videos, train a tiny mPLUG-Owl3 on two processes with FSDP2
# and LV-XAttn until it answers correctly, then ask about a long video on four processes and on one.
#
#   bash scripts/demo.sh [FOLDER]      # all output goes to FOLDER, by default runs/demo

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/lib/venv.sh"
ensure_venv "test,video"
python="$venv_python"
cd "$root"

folder="${1:-runs/demo}"
rm -rf "$folder"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false PYTHONPATH="$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
launch() {
    "$python" -m accelerate.commands.launch --config_file "$@"
}
started=$SECONDS
stage() {
    printf '\n[%3d s] %s\n' "$((SECONDS - started))" "$*"
}

stage "making videos (one frame of each shows a coloured marker) and a model with random weights"
"$python" scripts/demo_task.py make "$folder"
answer="$("$python" -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["messages"][-1]["content"])' "$folder/long.jsonl")"

stage "training on 2 processes: FSDP2, LV-XAttn"
# shellcheck disable=SC2046 # the options must be split into words
launch configs/fsdp2_cpu_2.yaml scripts/finetune.py --model "$folder/model" --data "$folder/train.jsonl" \
    --output_dir "$folder/training" --strategy lv-xattn --sp 2 --logging_steps 10 --disable_tqdm true \
    $("$python" -c 'import demo_task; print(demo_task.FINETUNE)')
"$python" - "$folder/training/trainer_state.json" <<'PYTHON'
import json, sys

rows = json.load(open(sys.argv[1]))["log_history"]
losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
print("loss:", ", ".join(f"{loss:.4f} (step {step})" for step, loss in losses[:: max(1, len(losses) // 8)] + losses[-1:]))
PYTHON

stage "asking about videos that were not used in training"
"$python" scripts/demo_task.py score --model "$folder/training/model" --data "$folder/eval.jsonl" --at-least 0.95

stage "asking about a long video on 4 processes"
question=(--model "$folder/training/model" --video "$folder/videos/long/00000.mp4" --fps 1
    --question "Which colour is the marker?" --max-new-tokens 4 --evidence 5)
launch configs/fsdp2_cpu_4.yaml scripts/infer_long_video.py "${question[@]}" --report "$folder/four.json" \
    --evidence-html "$folder/evidence.html"

stage "asking about the same video on one process"
"$python" scripts/infer_long_video.py "${question[@]}" --report "$folder/one.json"

stage "comparing answers and evidence, and counting the bytes sent"
"$python" scripts/demo_check.py answers --one "$folder/one.json" --many "$folder/four.json" --expected "$answer"
"$python" scripts/demo_check.py evidence --one "$folder/one.json" --many "$folder/four.json" --data "$folder/long.jsonl"
printf 'the page %s shows where in the video the answer comes from\n' "$folder/evidence.html"
"$python" scripts/demo_check.py bytes --model "$folder/training/model" --data "$folder/long.jsonl" --ranks 4
stage "done"
