"""Fine-tuning on conversations about videos: `finetune` is the program, and `trainer` has `SeqParTrainer`."""
