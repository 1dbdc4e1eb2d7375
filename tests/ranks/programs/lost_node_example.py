"""examples/train_grpo.py on a rank of which the test must know the process and the error, in files under RUN_DIR.

A launcher ends its ranks when one has ended, so a rank stays until its neighbours of the node have noted their errors
too.
"""

import os
import time
from pathlib import Path

import train_grpo

FOLDER, RANK = Path(os.environ["RUN_DIR"]), os.environ["RANK"]

if __name__ == "__main__":
    (FOLDER / f"{RANK}.pid").write_text(str(os.getpid()), encoding="utf-8")
    try:
        train_grpo.main()
    except Exception as error:
        text = FOLDER / f"{RANK}.part"
        text.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        text.rename(FOLDER / f"{RANK}.error")  # never half of it
        while len(list(FOLDER.glob("*.error"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
            time.sleep(0.05)
        raise
