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
[ $# -gt 0 ] || rm -rf "$folder" # a directory that the caller names must be empty
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
seqpar() {
    "$python" -m mllm_seqpar "$@"
}
started=$SECONDS
stage() {
    printf '\n[%3d s] %s\n' "$((SECONDS - started))" "$*"
}

echo "The demo takes about 6 minutes on two CPU cores, most of it the training; a busy machine takes longer."
stage "making 529 videos (one frame of each shows a coloured marker) and a model with random weights: about 20 s"
seqpar example --output "$folder" --short 384 --short_frames 64 --longer 48 --unseen 96 --long_frames 2100
answer="$("$python" -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["messages"][-1]["content"])' "$folder/long.jsonl")"

stage "training on 2 processes (FSDP2, LV-XAttn): 200 steps, about 4 minutes; the column ETA says what is left"
"$python" -m accelerate.commands.launch --config_file configs/fsdp2_cpu_2.yaml -m mllm_seqpar finetune \
    --model "$folder/model" --data "$folder/train.jsonl" --output_dir "$folder/training" --strategy lv-xattn --sp 2 \
    --max_steps 200 --global_batch_size 16 --per_device_train_batch_size 8 --learning_rate 3e-3 --warmup_steps 30 \
    --lr_scheduler_type cosine --weight_decay 0.01 --logging_steps 20 --disable_tqdm true

stage "asking about 96 videos that were not used in training: about 20 s"
seqpar ask --model "$folder/training/model" --questions "$folder/eval.jsonl" --output "$folder/answers.jsonl" --choices --fps 1
"$python" scripts/demo_check.py accuracy --answers "$folder/answers.jsonl" --at-least 0.95

stage "asking about a video of 2,100 frames on 4 processes: about 20 s, in which each loads the model and decodes its frames"
question=(--model "$folder/training/model" --video "$folder/long.mp4" --fps 1
    --question "Which colour is the marker?" --max_new_tokens 4 --evidence 5)
seqpar ask --num_processes 4 "${question[@]}" --report "$folder/four.json" --evidence_html "$folder/evidence.html"

stage "asking about the same video on one process: about 10 s"
seqpar ask "${question[@]}" --report "$folder/one.json"

stage "comparing answers and evidence, and counting the bytes sent"
"$python" scripts/demo_check.py answers --one "$folder/one.json" --many "$folder/four.json" --expected "$answer"
"$python" scripts/demo_check.py evidence --one "$folder/one.json" --many "$folder/four.json" --data "$folder/long.jsonl"
printf 'the page %s shows the moments that the answer attends to\n' "$folder/evidence.html"
"$python" scripts/demo_check.py bytes --model "$folder/training/model" --data "$folder/long.jsonl" --ranks 4
stage "done"
