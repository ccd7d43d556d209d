"""Fine-tuning on conversations about videos: the run of `scripts/finetune.py` (`loop`) and `SeqParTrainer` (`trainer`)."""
