"""Package metadata of megatron_pg: the one place for it. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

TRAINING = ["pyyaml", "einops", "psutil"]  # what megatron.training imports and megatron-core does not require
DEMO = [*TRAINING, "matplotlib>=3.8", "tensorboard>=2.15"]
TEST = [*DEMO, "pytest>=8", "hypothesis>=6.100", "wandb>=0.17", "mypy>=1.13"]

setup(
    name="megatron-pg",
    version="0.1.0",
    description="Exactly normalised policy-gradient (RL) losses for Megatron-LM",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_pg", "megatron_pg.*"]),
    package_data={"megatron_pg": ["py.typed"], "megatron_pg.cli": ["*.bash"]},
    python_requires=">=3.10",
    entry_points={"console_scripts": ["megatron-pg = megatron_pg.cli:main"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16",
        "numpy",
        "packaging",
        'triton>=3.2; platform_system == "Linux"',
    ],
    extras_require={
        "training": TRAINING,
        "te": ["transformer-engine[pytorch]"],
        "wandb": ["wandb>=0.17"],
        "demo": DEMO,
        "test": TEST,
        "dev": [*TEST, "ruff>=0.6"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
