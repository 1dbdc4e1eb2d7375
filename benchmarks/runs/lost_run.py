"""A rank of a job in which a rank is lost, as tests/ranks/programs/lost_in_pretrain.py has it; lost_jobs.py starts it.

    python benchmarks/runs/lost_run.py CASE BACKEND

RANK, WORLD_SIZE and the address of the store are in the environment, as a launcher gives them.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/ranks/programs"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples/recipes"))

import lost_in_pretrain
from lost import Case

if __name__ == "__main__":
    lost_in_pretrain.train(Case.parse(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2])
