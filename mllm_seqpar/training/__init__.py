"""Fine-tuning on conversations about videos: `loop` runs `scripts/finetune.py`, and `trainer` has `SeqParTrainer`."""
