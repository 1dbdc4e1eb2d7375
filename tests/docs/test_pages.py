"""The pages: their code runs, their commands exist, their flags validate, their links lead somewhere, no message is
missing."""

import ast
import re
import shlex
import subprocess
import warnings
from argparse import ArgumentParser
from pathlib import Path

import dataflow
import faq_messages
import group_size
import kl_gradients
import length_bias
import pytest
import weights
import zigzag

from megatron_pg import add_arguments, validate_args
from megatron_pg.flags.banner import banner
from megatron_pg.hosts.startup import add_host_arguments

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs").glob("hosts/*.md")),
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
    for _, code in blocks(page, "bash"):
        if not (flags := flags_of(code)):
            continue
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
    flags = [f for action in add_arguments(ArgumentParser(add_help=False))._actions for f in action.option_strings]
    assert [flag for flag in flags if f"`{flag}`" not in page] == []


def test_the_words_of_the_index_are_kept():
    """A word in backticks in the last column is not an identifier of the package, but where a host's own names are
    read."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = [
        row.split("|") for row in index.partition("## Words")[2].partition("Symbols:")[0].splitlines() if "|" in row
    ]
    refused = {word for cells in rows for word in re.findall(r"`(\w+)`", cells[3])}
    assert len(refused) > 20
    found = set()
    for path in (ROOT / "megatron_pg").rglob("*.py"):
        if (ROOT / "megatron_pg/hosts") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
            found |= {(path.name, name) for name in names if isinstance(name, str) and name in refused}
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


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"} | {"../CONTRIBUTING.md"}
    assert [page for page in sorted(pages) if f"]({page})" not in index] == []


def test_every_message_of_the_code_is_on_its_page():
    found, page = faq_messages.messages(), faq_messages.PAGE.read_text(encoding="utf-8")
    listed = faq_messages.on_page(page)
    missing = [f"- `{pattern}`" for pattern in found if pattern not in listed]
    stale = [f"- `{pattern}`" for pattern in listed if pattern not in found]
    wanted = [
        "Paste into a group of docs/faq.md that explains it, or run python tests/helpers/faq_messages.py:",
        *missing,
    ]
    assert not missing + stale, "\n".join([*wanted, "Delete there:", *stale])
    assert len(listed) == len(set(listed))


def test_every_group_of_messages_is_explained():
    for section in faq_messages.PAGE.read_text(encoding="utf-8").split("\n### ")[1:]:
        prose = [line for line in section.split("\n## ")[0].splitlines()[1:] if not line.startswith(("- `", "<!--"))]
        assert len(" ".join(prose)) > 60, f"explain the messages under {section.splitlines()[0]!r}"


def test_the_lists_of_messages_are_brought_up_to_date():
    page = "### Old\n<!-- takes: a, b -->\n\n- `one of a`\n- `gone`\n\nProse.\n"
    filled = faq_messages.fill(page, {"one of a": "a", "two of b": "b", "three of c": "c"})
    assert filled == (
        "### Old\n<!-- takes: a, b -->\n\n- `two of b`\n- `one of a`\n\nProse.\n"
        "\n### New messages of c\n<!-- takes: c -->\n\n- `three of c`\n"
    )
    assert faq_messages.fill(filled, {"one of a": "a", "two of b": "b", "three of c": "c"}) == filled


def test_a_message_is_read_with_its_constants_and_its_values_apart(tmp_path, monkeypatch):
    room = tmp_path / "room.py"
    room.write_text(
        "def check(x) -> Violations:\n"
        "    flag = '--flag'\n"
        "    if x:\n"
        "        raise ValueError(f'{flag} is {x!r}, so nothing ' + 'works.')\n"
        "    yield 'E1 a rule that is broken'\n"
        "def length_message(n) -> str:\n"
        "    return f'{n} is too long' if n else 'it is not there at all'\n"
        "def label(n) -> str:\n"
        "    return 'this is not a message'\n"
    )
    monkeypatch.setattr(faq_messages, "PACKAGE", tmp_path)
    expected = ["--flag is …, so nothing works.", "a rule that is broken", "… is too long", "it is not there at all"]
    assert list(faq_messages.collect()) == expected


def test_a_message_is_read_whole(tmp_path, monkeypatch):
    """With each of the texts that a value of it may be, and once."""
    (tmp_path / "room.py").write_text(
        "FLAWS = {'a': 'is noisy', 'b': None, 'c': 'is biased'}\n"
        "def rules(args, own) -> Violations:\n"
        "    for name, why in (('one_flag', 'scales the logits'), ('other', 'defers them')):\n"
        '        yield f\'E1 --{name.replace("_", "-")} {why}; remove it\'\n'
        "    for reader in readers(f'--no-message {args}'):\n"
        "        raise ArgumentError(list(sort(reader)))\n"
        "def readers(args) -> Iterator[str]:\n"
        "    yield f'--pg-correction {args}'\n"
        "def probe(x) -> str | None:\n"
        "    if x:\n"
        "        return f'fails on {x} tokens'\n"
        "def load(path):\n"
        "    if reason := probe(path):\n"
        "        raise ValueError(f'custom objective {path!r} {reason}')\n"
        "    torch._assert_async(path > 0, 'asserted on the device')\n"
        "    return None, ValueError('an error that travels')\n"
        "def more_warnings(args) -> list[str]:\n"
        "    messages = []\n"
        "    if flaw := FLAWS[args]:\n"
        "        messages.append(f'estimator {args}: {flaw}')\n"
        "    flags = {'--a': 1}\n"
        "    return messages + [f'{flag} does nothing here' for flag, given in flags.items() if given]\n"
        "def read(line):\n"
        "    warnings.warn(f'line {line} was skipped', stacklevel=2)\n"
        "    raise unfinished(line, 'an array without end')\n"
        "def unfinished(line, what) -> InputError:\n"
        "    return InputError(f'line {line}: {what}, so nothing is read')\n"
    )
    monkeypatch.setattr(faq_messages, "PACKAGE", tmp_path)
    assert list(faq_messages.collect()) == [
        *("--one-flag scales the logits; remove it", "--other defers them; remove it"),
        *("custom objective … fails on … tokens", "asserted on the device", "an error that travels"),
        *("estimator …: is noisy", "estimator …: is biased", "--a does nothing here"),
        *("line … was skipped", "line …: an array without end, so nothing is read"),
    ]


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


def rules_of_the_code() -> set[str]:
    """The numbers that messages carry: texts such as "E5", and those that begin with one."""
    texts = [
        node.value
        for path in (ROOT / "megatron_pg").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {match[1] for text in texts if (match := re.match(r"(E\d+)(?: |$)", text))}


def test_every_rule_that_a_message_names_is_explained_in_one_row():
    rows = re.findall(r"^\| (E\d+) \| (.+) \|$", faq_messages.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 40
    assert [rule for rule, _ in rows] == sorted(rules_of_the_code(), key=lambda rule: int(rule[1:]))
    assert all(len(sentence.split()) >= 4 for _, sentence in rows)
