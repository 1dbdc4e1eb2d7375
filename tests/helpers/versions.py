"""`make prove HOSTS="…/slime@624b824a …/slime@v0.3.1"`: the tests of hosts at several commits, and the table of them.

Each word is a checkout, a folder named slime, miles or nemo_rl or `HOST@NAME`, and may have `@COMMIT`; tested is a
worktree of it. The tests start the host, convert samples and train: those of tests/hosts in the host's own code, and
its driver's. Their rows go into the table of docs/hosts/drivers.md.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "hosts" / "drivers.md"
HEAD = "| host | commit | committed | passed | failed | first error | run on |\n|---|---|---|---:|---:|---|---|\n"
SELECTIONS = {  # of a host: a file, and what `-k` selects in it and in tests/drivers
    "slime": ("tests/hosts/test_rollout_hosts.py", "slime and (drivers or (its and own))"),
    "miles": ("tests/hosts/test_rollout_hosts.py", "miles and (drivers or (its and own))"),
    "nemo_rl": ("tests/hosts/test_nemo_rl_checkout.py", "nemo_rl"),
}
WRAPPERS = r"ray\.|torch\.distributed\.elastic"  # errors that say that a process has failed


def split(word: str) -> tuple[str, str, str]:
    """Checkout, host and commit."""
    checkout, commit = (word, "HEAD") if Path(word).is_dir() else word.rpartition("@")[::2]
    host = Path(checkout).name.partition("@")[0]
    if host not in SELECTIONS or not Path(checkout).is_dir():
        raise ValueError(f"HOSTS has {word!r}; name folders {', '.join(SELECTIONS)}, each with @COMMIT or without")
    return checkout, host, commit


def tested(checkout: str, host: str, commit: str) -> tuple[str, ...]:
    """The cells of the table."""
    with tempfile.TemporaryDirectory() as folder:
        place, out = os.path.join(folder, host), os.path.join(folder, "junit.xml")
        git(checkout, "worktree", "add", "--quiet", "--detach", place, commit)
        try:
            day, digits = git(place, "log", "-1", "--format=%cs %h", "--abbrev=8").split()
            file, selected = SELECTIONS[host]
            command = [sys.executable, "-m", "pytest", "-q", file, "tests/drivers", "-k", selected]
            environment = os.environ | {"HOSTS": folder, host.upper(): place}
            command.append(f"--junitxml={out}")
            subprocess.run(command, cwd=TESTS.parent, env=environment, check=False, stdout=sys.stderr)
        finally:
            git(checkout, "worktree", "remove", "--force", place)
        today = str(datetime.date.today())
        name = (Path(checkout).name.partition("@")[2] or digits) if commit == "HEAD" else commit
        return host, name, day, *counted(ElementTree.parse(out)), today


def git(folder: str, *words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", "-C", folder, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def counted(report: ElementTree.ElementTree) -> tuple[str, str, str]:
    """Passed and failed tests of pytest's report, and the line of the error in the first one that failed."""
    outcomes = [{child.tag: child.text or "" for child in case} for case in report.iter("testcase")]
    texts = [each.get("failure", each.get("error", "")) for each in outcomes if each.keys() & {"failure", "error"}]
    passed = sum(not each.keys() & {"failure", "error", "skipped"} for each in outcomes)
    error = rf"^E\s+(?:\[rank\d+\]: )?(?!{WRAPPERS})((?:\w+\.)*\w+Error: .+|assert .+)"
    lines = [line for text in texts[:1] for line in re.findall(error, text, re.M)]
    return str(passed), str(len(texts)), lines[-1][:150].replace("|", "/") if lines else ""


def page_with(page: str, row: Sequence[str]) -> str:
    """The page with the row in its table, in the place of that of the same host and commit."""
    before, after = page.split(HEAD)
    lines = re.match(r"(?:\|.*\n)*", after).group()
    rows = {tuple(line.split(" | ")[:2]): line for line in [*lines.splitlines(), f"| {' | '.join(row)} |"]}
    return before + HEAD + "".join(f"{rows[key]}\n" for key in sorted(rows)) + after.removeprefix(lines)


def main(words: Sequence[str]) -> bool:
    """Tests every version, and writes and prints its row; returns whether a test has failed."""
    rows = []
    for version in [split(word) for word in words]:
        rows.append(tested(*version))
        PAGE.write_text(page_with(PAGE.read_text("utf-8"), rows[-1]), "utf-8")
    print(HEAD + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    return any(row[4] != "0" for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
