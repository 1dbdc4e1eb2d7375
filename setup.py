"""Package metadata of megatron_pg: the one place for it. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
URL = ""  # the project's home, https://HOST/OWNER/NAME: set it once there is one
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "megatron_pg/__init__.py").read_text("utf-8"), re.MULTILINE)[1]
FILES = f"{URL}/blob/v{VERSION}/"  # of this version
LINKS = {"Documentation": f"{FILES}docs/index.md", "Changelog": f"{FILES}CHANGELOG.md", "Issues": f"{URL}/issues"}

TRAINING = ["pyyaml", "einops", "psutil"]  # what megatron.training imports and megatron-core does not require
DEMO = [*TRAINING, "matplotlib>=3.8", "tensorboard>=2.15"]
REPORT = ["plotly>=6"]
COMPLETION = ["argcomplete>=3.4"]
TEST = [*DEMO, *REPORT, *COMPLETION, "pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "wandb>=0.17", "mypy>=1.13"]
SITE = ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=1", "latex2mathml>=3.77"]


def long_description() -> str:
    """The README; where the project has a URL, its relative links lead to this version's files there."""
    page = (HERE / "README.md").read_text(encoding="utf-8")
    base = {"": FILES, "!": f"{URL}/raw/v{VERSION}/"}  # pages, and pictures
    return re.sub(r"(!?)(\[[^\]]*\]\()(?!https:|#)", lambda link: link[0] + base[link[1]], page) if URL else page


setup(
    name="megatron-pg",
    version=VERSION,
    description="Exactly normalized policy-gradient (RL) losses for Megatron-LM",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    url=URL or None,
    project_urls=LINKS if URL else {},
    keywords=["Megatron-LM", "reinforcement learning", "policy gradient", "GRPO", "PPO"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_pg", "megatron_pg.*"]),
    package_data={"megatron_pg": ["py.typed"], "megatron_pg.cli.runs": ["*.html"]},
    python_requires=">=3.10",
    entry_points={"console_scripts": ["megatron-pg = megatron_pg.cli:main"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16",
        "numpy",
        "packaging",
        "typing-extensions",
        'triton>=3.2; platform_system == "Linux"',  # of torch 2.6 and 2.7: --pg-kernel torch; the kernels need 3.4
    ],
    extras_require={
        "training": TRAINING,
        "te": ["transformer-engine[pytorch]"],
        "wandb": ["wandb>=0.17"],
        "report": REPORT,
        "demo": DEMO,
        "completion": COMPLETION,
        "test": TEST,
        "site": SITE,
        "dev": [*TEST, *SITE, "build>=1.2", "ruff>=0.6"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
