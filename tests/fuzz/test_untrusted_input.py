"""Text and files from outside end in a named error: nothing is imported, executed or printed raw."""

import json
import pickle
import random
import sys
from pathlib import Path

import pytest
import torch
from rollout_files import CONTROL, HEADER, RECORD, Loud, damaged, malformed_lines

from megatron_pg import RolloutFileError, Sample, StepPlanError, plan_step, read_rollouts
from megatron_pg.declarations.choices import REDUCER_PARAMETERS
from megatron_pg.flags.import_path import ImportPathError, load_function
from megatron_pg.metrics.file import MetricsFile
from megatron_pg.metrics.reporting import console_line
from megatron_pg.rollouts.printable import printable

CANARY = """
from pathlib import Path
Path({flag!r}).touch()
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    Path({flag!r}).touch()
"""
LONGEST_MESSAGE = 1000


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A module `canary` that can be imported and leaves a file when it is; returns whether it still sings."""
    flag = tmp_path / "flag"
    (tmp_path / "canary.py").write_text(CANARY.format(flag=str(flag)), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield lambda: not flag.exists() and "canary" not in sys.modules
    sys.modules.pop("canary", None)


def is_clean(error: BaseException) -> bool:
    """Whether a message can be shown: one line, no control characters, of a readable length."""
    return str(error).isprintable() and len(str(error)) <= LONGEST_MESSAGE


# --- import paths ---

FORBIDDEN = [*" \t\n\r\0\x1b\x7f/\\-+*()[]{}<>'\"`,;|&$#@!?%^~=", *"\u200b\u202e\u2028é\ud800\U0001f426"]
NO_PATHS = """. : canary canary: :reducer canary. .reducer canary::reducer canary..reducer canary:reducer:more
canary:reducer.more ./canary.py:reducer canary.py:reducer /tmp/canary.py:reducer ..canary:reducer canary/reducer
canary\\reducer file:///tmp/canary.py:reducer ~/canary:reducer http://example.com/canary:reducer pkg://canary:reducer
git+https://example.com/canary.git s3://b/canary canary:__call__ canary:__import__ __main__:reducer
canary.__class__:reducer builtins:__import__ canary.__dict__.reducer canary:reducer.__globals__
os.__loader__:load_module __builtins__:eval canary:reducer() canary:lambda (canary):reducer
__import__('canary').reducer $(canary):reducer 1canary:reducer canary:1reducer canary:re-ducer
кенар:reducer canary:ｒeducer canary:ﬁ %s%n ${canary} {canary}"""
MALFORMED = [
    *("", " ", *NO_PATHS.split(), "lambda *a: 0", "lambda x: x", "canary:reducer if 1 else 0", "import canary"),
    *("exec('import canary')", "canary;import os", "\x1b[2J\x1b]0;canary\x07"),
    *("a" * 100_000 + "/", "a." * 50_000 + "/", "a:" * 50_000),
]
REFUSED_OBJECTS = [
    *("torch.os:system", "torch:os", "torch.os", "torch.os.system", "os:system", "os.path", "sys:modules", "sys:path"),
    *("builtins:exec", "builtins:eval", "builtins:open_code", "subprocess:Popen", "pathlib:Path", "torch:Tensor"),
    *("json:absent", "absent_module_of_nobody:f", "os.absent:f", "math:pi", "asyncio:run", "torch:load_nothing"),
]
NOT_STRINGS = [b"canary:reducer", 1, 1.5, True, ["canary:reducer"], {"canary": "reducer"}, object(), len]


def malformed_paths() -> list[object]:
    """A good path with one forbidden character at every place, and paths that were never good."""
    good = "canary:reducer"
    spoilt = [good[:i] + c + good[i:] for c in FORBIDDEN for i in range(len(good) + 1)]
    return [*MALFORMED, *NOT_STRINGS, *spoilt]


@pytest.mark.proof("untrusted import paths refused, nothing imported")
def test_a_malformed_path_is_refused_before_anything_is_imported(canary, evidence):
    paths, modules, search = malformed_paths(), set(sys.modules), list(sys.path)
    for path in paths:
        with pytest.raises(ImportPathError) as error:
            load_function(path, REDUCER_PARAMETERS)
        assert is_clean(error.value), path
        assert canary(), path
    assert set(sys.modules) == modules
    assert sys.path == search
    evidence(cases=len(paths))


@pytest.mark.proof("untrusted import paths refused, nothing imported")
@pytest.mark.parametrize("path", REFUSED_OBJECTS)
def test_what_is_no_function_of_four_arguments_is_refused(path, evidence):
    with pytest.raises(ImportPathError) as error:
        load_function(path, REDUCER_PARAMETERS)
    assert is_clean(error.value)
    evidence(cases=1)


def test_the_canary_is_imported_by_its_own_path(canary):
    """Control: the path that all the malformed ones are made of is a good one."""
    assert canary()
    load_function("canary:reducer", REDUCER_PARAMETERS)
    assert not canary()


def refuses(path: Path) -> bool:
    with pytest.raises(RolloutFileError) as error:
        read_rollouts(path)
    return is_clean(error.value)


@pytest.mark.proof("untrusted rollout files refused by name")
def test_a_malformed_line_is_refused_with_a_message_that_can_be_shown(tmp_path, full, evidence):
    lines, path = malformed_lines()[:: 1 if full else 2], tmp_path / "rollouts.jsonl"
    head = json.dumps(HEADER).encode() + b"\n"
    for line in lines:
        path.write_bytes(head + line + b"\n")
        assert refuses(path), line[:200]
        path.write_bytes(line + b"\n" + head)  # as a header
        assert refuses(path), line[:200]
    evidence(cases=2 * len(lines))


@pytest.mark.proof("untrusted rollout files refused by name")
def test_a_file_with_random_damage_is_read_or_refused_by_name(tmp_path, full, evidence):
    rng, count, errors = random.Random(0), 2000 if full else 200, []
    good = b"\n".join(json.dumps(line).encode() for line in (HEADER, RECORD, RECORD)) + b"\n"
    path = tmp_path / "rollouts.jsonl"
    for _ in range(count):
        path.write_bytes(damaged(good, rng))
        try:
            read_rollouts(path)
        except RolloutFileError as error:
            errors.append(error)
    assert count / 2 < len(errors) < count
    assert all(is_clean(error) for error in errors)
    evidence(cases=count)


@pytest.mark.proof("untrusted rollout files refused by name")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_not_executed(tmp_path, protocol, evidence):
    flag, path = tmp_path / "flag", tmp_path / "rollouts.jsonl"
    data = pickle.dumps(Loud(flag), protocol)
    for content in (data, json.dumps(HEADER).encode() + b"\n" + data + b"\n"):
        path.write_bytes(content)
        assert refuses(path)
    torch.save({"tokens": [1]}, path)
    assert refuses(path)
    assert not flag.exists()
    pickle.loads(data)  # control: this one would have
    assert flag.exists()
    evidence(cases=3)


@pytest.mark.proof("untrusted rollout files refused by name")
def test_a_name_that_no_file_has_is_a_named_error(tmp_path, evidence):
    (tmp_path / "\x1b[31mred\n").write_bytes(b"{}\n")
    names = ["absent", "", "a\0b", "\x1b[31mred\n", "x" * 300]
    for name in names:
        with pytest.raises(RolloutFileError) as error:
            read_rollouts(tmp_path / name)
        assert str(error.value).isprintable()
    evidence(cases=len(names))


def test_a_link_to_a_rollout_file_is_followed(tmp_path):
    (tmp_path / "real").write_text(f"{json.dumps(HEADER)}\n{json.dumps(RECORD)}\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert len(read_rollouts(tmp_path / "link")) == 1


# --- ids, metrics files and log lines ---


@pytest.mark.proof("control characters reach no message or log line")
@pytest.mark.parametrize("text", CONTROL)
def test_control_characters_in_ids_reach_no_message(text, evidence):
    fields = {"tokens": [1, 2], "response_length": 1, "loss_mask": [1], "old_logprobs": [-1.0], "advantage": 1.0}
    for name in ("prompt_id", "rollout_id"):
        with pytest.raises(ValueError, match=f"{name}=.* is neither") as error:
            Sample.build(**fields, **{name: text})
        assert is_clean(error.value)
        with pytest.raises(StepPlanError) as error:
            plan_step([0], aggregation="prompt_mean", rollout_ids=[text], prompt_ids=[text])
        assert is_clean(error.value)
    assert Sample.build(**fields, sample_id=text).sample_id.isprintable()
    with pytest.raises(ValueError, match="loss_mask of sample") as error:
        Sample.build(**fields | {"loss_mask": [1, 1]}, sample_id=text)
    assert is_clean(error.value)
    assert printable(text).isprintable()
    evidence(cases=6)


METRIC_LINES = [b"\xff\n", b"[" * 100_000 + b"\n", b'{"iteration": 1e999}\n', b'{"iteration": null}\n', b"\x1b[2J\n"]
METRIC_LINES += [b'{"iteration": []}\n', b"{}\n", b"1\n", b"\0\n", b'{"iteration": NaN}\n', b"9" * 5000 + b"\n", b"\n"]


@pytest.mark.proof("control characters reach no message or log line")
@pytest.mark.parametrize("name", ["metrics.jsonl", "\x1b[31m.jsonl"])
def test_a_file_of_something_else_is_no_metrics_file_and_stays(tmp_path, name, evidence):
    for content in METRIC_LINES:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a line of a metrics file") as error:
            MetricsFile(path)
        assert is_clean(error.value)
        assert path.read_bytes() == content
    evidence(cases=len(METRIC_LINES))


def test_the_console_line_shows_numbers_and_nothing_else():
    values = {"pg_loss": "\x1b[31m", "entropy": float("nan"), "ess": None, "\x1b[2J": 1.0, "grad_norm": float("-inf")}
    assert console_line(3, values) == "pg      3 | entropy +nan | grad_norm -inf"
