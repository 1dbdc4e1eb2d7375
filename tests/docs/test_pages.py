"""The pages: their code runs, their commands exist, their flags validate, their links lead somewhere, no rule is
missing."""

import ast
import functools
import re
import shlex
import subprocess
import warnings
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import dataflow
import group_size
import kl_gradients
import length_bias
import pytest
import weights
import zigzag

from megatron_pg import add_arguments, validate_args
from megatron_pg.args import own_arguments
from megatron_pg.flags import errors
from megatron_pg.flags.banner import banner
from megatron_pg.hosts.startup import add_host_arguments

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs").glob("hosts/*.md")),
    *sorted((ROOT / "docs").glob("upstream/*.md")),
]
OURS = re.compile(r"--(?:pg-[a-z0-9]+|loss-aggregation|custom-pg|fp32-lm-head|docs-per-step)(?:-[a-z0-9]+)*")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Code blocks of a language, each with the rest of its opening line."""
    found = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [(rest.strip(), code) for name, rest, code in found if name == language]


@every_page
def test_every_python_block_runs_and_every_excerpt_parses(page):
    for kind, code in blocks(page, "python"):
        assert kind in ("", "excerpt"), kind
        compiled = compile(code, str(page), "exec")
        if not kind:
            exec(compiled, {})


@every_page
def test_every_shell_block_is_valid_and_names_what_exists(page):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for _, code in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        for path in re.findall(r"(?:bash|python) ((?:examples|papers|benchmarks|docs|tests)/\S+)", code):
            assert (ROOT / path).is_file(), path
        assert set(re.findall(r"^make (\w+)", code, re.MULTILINE)) <= set(targets)


def flags_of(code: str) -> list[str]:
    """The words of a shell block from the first flag of ours on, without the names and brackets of arrays."""
    words = shlex.split(code.replace("=(", " ").replace(")\n", "\n").replace("\\\n", " "), comments=True)
    first = next((i for i, word in enumerate(words) if OURS.fullmatch(word)), len(words))
    return words[first:]


def parser() -> ArgumentParser:
    """Our flags, and Megatron's that share a block with them."""
    parser = add_arguments(ArgumentParser(allow_abbrev=False))
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--dataloader-type", default="external")
    parser.add_argument("--context-parallel-size", type=int)
    return parser


@every_page
def test_the_flags_of_every_shell_block_parse_and_validate(page):
    commands = [part for _, code in blocks(page, "bash") for part in re.split(r"^(?=megatron-pg )", code, flags=re.M)]
    for flags in filter(None, map(flags_of, commands)):
        args, unknown = parser().parse_known_args(flags)
        assert not [word for word in unknown if OURS.match(word)]
        users = args.custom_pg_loss_reducer_function_path, args.pg_custom_objective_path
        if users == (None, None):  # else: a file that is not here
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                validate_args(args)


@every_page
def test_every_flag_of_ours_that_a_page_names_exists(page):
    known, text = add_host_arguments(ArgumentParser()).format_help(), page.read_text(encoding="utf-8")
    declared = {f"--pg-{name}" for name in re.findall(r'Number\(\s*name="(\w+)"', text)}  # by the page itself
    assert set(OURS.findall(text)) <= set(re.findall(r"--[a-z0-9-]+", known)) | declared


def test_the_page_of_flags_has_every_flag():
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    flags = [f"--{name.replace('_', '-')}" for name in own_arguments()]
    assert [flag for flag in flags if f"`{flag}`" not in page] == []


@functools.cache
def names_and_texts() -> tuple[set[tuple[Path, str]], set[str]]:
    """Names in the package's files, and the texts in them."""
    names, texts = set(), set()
    for path in (ROOT / "megatron_pg").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
            names |= {(path, name) for name in found if isinstance(name, str)}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return names, texts


def test_the_words_of_the_glossary_are_kept():
    """A word in backticks in the last column is not an identifier of the package, but where a host's own names are
    read."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in page.partition("Symbols:")[0].splitlines() if "|" in row]
    refused = {word for cells in rows for word in re.findall(r"`(\w+)`", cells[3])}
    assert len(refused) > 20
    names, _ = names_and_texts()
    package = ROOT / "megatron_pg"
    of_hosts = {package / "hosts", *(package / f"{name}.py" for name in ("slime", "miles", "nemo_rl"))}
    found = {(path.name, name) for path, name in names if name in refused and not of_hosts & {path, *path.parents}}
    assert not found


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@every_page
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        where = page.parent / path if path else page
        assert where.exists(), target
        assert not anchor or anchor in headings(where), target


def test_the_quickstart_shows_the_banner_as_it_is():
    args = validate_args(parser().parse_args(["--loss-aggregation", "constant", "--loss-aggregation-divisor", "6"]))
    (shown,) = (code for _, code in blocks(ROOT / "docs" / "quickstart.md", "text"))
    assert set(shown.splitlines()) - {"…"} <= set(banner(args).splitlines())


def test_the_papers_page_shows_what_the_scripts_compute():
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").replace("−", "-")
    for row in length_bias.measure((0.06, 0.08, 0.1, 0.125, 0.16, 0.2)):
        figures = " | ".join(f"{value:+.4f}" for value in (row.truth, row.constant, row.sample_mean))
        assert f"| {row.p:g} | {figures} |" in page
    for size in group_size.GROUP_SIZES:
        assert re.search(rf"^\| {size} \|.*\| {group_size.prompt_mean_exact(size):.4f} \|", page, re.MULTILINE)
    for row in kl_gradients.measure():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {row.kind} "))
        errors = (row.plain, row.weighted, row.plain_off_policy, row.weighted_off_policy)
        assert re.findall(r"[\d.]+", line.split("|", 4)[4]) == ["0" if e < 1e-9 else f"{e:.4f}" for e in errors]


def test_the_navigation_has_every_page():
    named = re.findall(r": ((?:\w+/)?\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES[2:])
    ours = [page for page in named if not page.startswith("upstream/")]  # those are texts for other projects
    assert sum(len((ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()) for page in ours) <= 3760


def test_the_page_of_the_drivers_counts_the_lines_that_are_not_the_hosts():
    programs = ROOT / "tests" / "drivers" / "programs"
    counted = dict(re.findall(r"`(\w+\.py)` (\d+)", (ROOT / "docs/hosts/drivers.md").read_text(encoding="utf-8")))
    ours = {"drive.py", "inputs.py", "recorder.py", "driver_reducers.py"}  # what calls a host, and what watches it
    lines = {path.name: str(len(path.read_text(encoding="utf-8").splitlines())) for path in programs.glob("*.py")}
    assert counted == {name: count for name, count in lines.items() if name not in ours}


def test_the_pictures_are_drawn_from_the_package(tmp_path, capsys):
    assert weights.weights("sample_mean", ["p", "q"]) == [0.05, 0.0005]
    assert weights.shares(weights.weights("token_mean", ["p", "q"])) == pytest.approx([10 / 1010, 1000 / 1010])
    assert weights.weights("constant", ["p", "q"]) == [1 / 8192, 1 / 8192]
    assert (zigzag.trained(0), zigzag.trained(1)) == (4, 6)
    assert [dataflow.stations(per_token=flag)[-1][1] for flag in (False, True)] == [1.0, 1.0]
    for picture in (weights, zigzag, dataflow):
        picture.main(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.png")]
    assert len(sizes) == 3
    assert 5_000 < min(sizes) <= max(sizes) < 100_000


def test_every_picture_has_a_command_that_draws_it():
    """Scripts of docs/pictures and papers, `make docs`, or the run that a page lists."""
    scripts = [*(ROOT / "docs/pictures").glob("*.py"), *(ROOT / "papers").glob("*.py"), ROOT / "Makefile"]
    texts = [path.read_text(encoding="utf-8") for path in scripts]
    pictures = {path.name for path in (ROOT / "docs/pictures").glob("*.png")}
    of_a_run = {"distillation.png"}  # curves.png of runs/student
    assert "--run-dir runs/student" in (ROOT / "docs/distillation.md").read_text(encoding="utf-8")
    assert pictures - of_a_run == {name for name in pictures if any(name in text for text in texts)}


MESSAGES = ROOT / "docs" / "messages.md"


def test_every_rule_of_the_code_has_one_row_with_cause_and_fix():
    """The number of a rule is a separate text, or begins the text of a message."""
    found = {match[1] for text in names_and_texts()[1] if (match := re.match(r"\[?([EWR]\d+)(?:\]? |$)", text))}
    rows = re.findall(r'^\| <a id="(\w+)"></a>(\w+) \| (.+) \| (.+) \|$', MESSAGES.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 60
    assert sorted(rule for _, rule, *_ in rows) == sorted(found)
    for anchor, rule, cause, fix in rows:
        assert anchor == rule.lower()
        assert len(cause.split()) >= 4, rule
        assert cause.endswith("."), rule
        assert fix.endswith("."), rule


def test_every_exception_of_the_package_has_a_row():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "megatron_pg").rglob("*.py")]
    classes = {name for source in sources for name in re.findall(r"^class (\w+Error)\(", source, re.MULTILINE)}
    page = MESSAGES.read_text(encoding="utf-8")
    assert [name for name in sorted(classes) if f"`{name}`" not in page] == []
    assert len(page.splitlines()) <= 300


@pytest.mark.parametrize(
    ("urls", "footer"),
    [
        (["Documentation, https://host/o/n/blob/v1/docs/index.md"], "https://host/o/n/blob/v1/docs/messages.md#e5"),
        ([], ""),
    ],
)
def test_an_error_links_to_its_rule_where_the_project_has_a_home_page(urls, footer, monkeypatch):
    monkeypatch.setattr(errors, "metadata", lambda name: SimpleNamespace(get_all=lambda key: urls))
    lines = str(errors.ArgumentError([("E5", "--flag is missing"), ("E9", "--other is given")])).splitlines()
    assert lines[1:3] == ["  [E5] --flag is missing", "  [E9] --other is given"]
    assert lines[3:] == ([f"Causes and fixes: {footer}"] if footer else [])
