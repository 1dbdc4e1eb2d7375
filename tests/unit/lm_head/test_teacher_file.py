"""A teacher's head on disk: which rows a rank reads, and what is no such file."""

import pytest
import torch
from namespaces import arguments
from teacher_files import write_head

from megatron_pg.args import validate_args
from megatron_pg.lm_head.teacher_file import TeacherHead
from megatron_pg.plan.settings import LossSettings

WEIGHT = torch.arange(15.0).view(5, 3) - 7


def read(head: TeacherHead, first: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return head.read(first, count, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["weight", "lm_head.weight"])
def test_each_rank_reads_its_rows_and_zeros_for_padding(dtype, name, tmp_path):
    path = tmp_path / "model.safetensors"
    write_head(path, WEIGHT.to(dtype), name)
    head = TeacherHead.of(str(path) if name == "weight" else f"{path}:{name}")
    assert (head.rows, head.width) == (5, 3)
    for wanted in (torch.float32, torch.bfloat16, torch.float64):
        parts = [read(head, 2 * rank, 2, wanted) for rank in range(4)]
        assert all(part.dtype == wanted for part in parts)
        assert torch.equal(torch.cat(parts), torch.cat([WEIGHT, torch.zeros(3, 3)]).to(wanted))


def test_the_library_of_the_format_writes_such_files(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a": torch.ones(7), "lm_head.weight": WEIGHT.bfloat16()}, tmp_path / "m.safetensors")
    assert torch.equal(read(TeacherHead.of(f"{tmp_path}/m.safetensors:lm_head.weight"), 0, 5), WEIGHT)


def test_a_path_with_a_colon_needs_the_name(tmp_path):
    path = tmp_path / "a:b"
    write_head(path, WEIGHT)
    assert TeacherHead.of(f"{path}:weight").path == str(path)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"shape": [15]}, "not enough values"),
        ({"shape": [4, 3]}, "it was cut short"),
        ({"dtype": "I64"}, "it is in I64"),
        ({"dtype": "BF16"}, "it was cut short"),
        ({"data_offsets": [12, 10**9]}, "it was cut short"),
        ({"data_offsets": [72, 12]}, "it was cut short"),
        ({"data_offsets": [-48, 12]}, "it was cut short"),
        ({"dtype": ["F32"]}, "unhashable"),
        ({"shape": "ab"}, ""),
        ({"shape": [5.0, 3]}, r"it has the shape \[5.0, 3\]"),
        ({"shape": [-5, -3]}, "it has the shape"),
        ({"shape": [5, 0], "data_offsets": [12, 12]}, "it has the shape"),
        ({"data_offsets": [12.0, 72.0]}, r"it has the shape \[5, 3\] at \[12.0, 72.0\]"),
    ],
)
def test_another_entry_is_refused(entry, reason, tmp_path):
    write_head(tmp_path / "h", WEIGHT, **entry)
    with pytest.raises(
        ValueError, match=rf"head=.* of --pg-term is not a safetensors file with a matrix weight .*{reason}"
    ):
        TeacherHead.of(str(tmp_path / "h"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not begin with a header"),
        ((50).to_bytes(8, "little") + b'{"weight": 1}', "does not begin with a header"),  # cut in it
        (b"\x80\x04\x95" + b"\xff" * 40, "does not begin with a header"),  # a pickle
        ((2).to_bytes(8, "little") + b"[]", "it holds"),
        ((1).to_bytes(8, "little") + b"\xff", "decode"),
        ((13).to_bytes(8, "little") + b'{"weight": 1}', "subscriptable"),
    ],
)
def test_another_file_is_refused(content, reason, tmp_path):
    (tmp_path / "h").write_bytes(content)
    with pytest.raises(ValueError, match=rf"is not a safetensors file with a matrix weight .*{reason}"):
        TeacherHead.of(str(tmp_path / "h"))


def test_a_file_that_is_not_there_or_holds_others_is_named(tmp_path):
    write_head(tmp_path / "h", WEIGHT, "lm_head.weight")
    with pytest.raises(ValueError, match=r"\(it holds lm_head.weight, model.norm.weight\)\. Give PATH:NAME"):
        TeacherHead.of(str(tmp_path / "h"))
    with pytest.raises(ValueError, match="No such file"):
        TeacherHead.of(str(tmp_path / "nothing"))


def test_another_vocabulary_is_refused(tmp_path):
    write_head(tmp_path / "h", WEIGHT)
    head = TeacherHead.of(str(tmp_path / "h"))
    head.check_vocabulary(5)
    for columns in (4, 8):
        with pytest.raises(ValueError, match=rf"has 5 rows and the student {columns} columns.*--pg-vocab-size 5"):
            head.check_vocabulary(columns)


def test_what_changes_after_the_start_or_is_not_finite_is_named(tmp_path):
    path = tmp_path / "h"
    write_head(path, torch.full((5, 3), 1e30))
    head = TeacherHead.of(str(path))
    with pytest.raises(ValueError, match=r"not finite in torch.float16.*train in bfloat16"):
        read(head, 0, 5, torch.float16)
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    assert len(read(head, 0, 4)) == 4
    with pytest.raises(ValueError, match="ends before row 4"):
        read(head, 3, 4)


@pytest.mark.usefixtures("rank_zero")
def test_the_settings_look_at_the_file_before_there_is_a_model(tmp_path):
    write_head(tmp_path / "h", WEIGHT)
    given = {"pg_term": [f"t:full_jsd,on=rl,head={tmp_path / 'h'}"], "pg_fused_head": "forward"}

    def settings(**rest: object) -> LossSettings:
        return LossSettings.from_args(validate_args(arguments(pg_kernel="torch", **given | rest)))

    assert settings(pg_vocab_size=5, padded_vocab_size=8).teacher_head == TeacherHead.of(str(tmp_path / "h"))
    assert settings(padded_vocab_size=None).teacher_head.rows == 5
    assert settings(pg_term=["t:full_jsd,weight=0,head=nothing"]).teacher_head is None
    for wrong in ({"pg_vocab_size": 4, "padded_vocab_size": 8}, {"padded_vocab_size": 8}):
        with pytest.raises(ValueError, match="has 5 rows and the student"):
            settings(**wrong)
    with pytest.raises(ValueError, match="No such file"):
        settings(pg_term=["t:full_jsd,head=nothing"])
