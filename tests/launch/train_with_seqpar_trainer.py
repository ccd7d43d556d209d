"""A training script with SeqParTrainer, as users write it: train_with_seqpar_trainer.py FOLDER.

It ends without destroying the process group.
"""

import json
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main(folder: Path) -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "distributed" / "training")]
    from test_trainer import train

    log, _ = train(0, 0, folder, "seqpar", max_steps=2, per_device_train_batch_size=4)
    if os.environ["RANK"] == "0":
        (folder / "log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
